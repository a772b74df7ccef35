"""The sampling servers of a run: which of them answer, which weights they have, and who completes which prompts."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from http import HTTPStatus
from pathlib import Path

from torch import Tensor

from rlhf.errors import ConfigError, SamplingError
from rlhf.models.backbone import context_length, evaluation_mode
from rlhf.models.text_config import text_config
from rlhf.sampling.canary import (
    KEY,
    SPREAD,
    TAIL,
    CanaryReading,
    compare_with_server,
    differing,
    forced_tail,
    is_rounding,
    likely_cause,
    misread,
)
from rlhf.sampling.launched import LaunchedServer
from rlhf.sampling.push import PushedPolicy, WeightFolders, tensor_digest
from rlhf.serving.http import JsonHttp, ServerDown, ServerRefused
from rlhf.serving.routes import Answer, Ask
from rlhf.serving.server import Link, Push, Server
from rlhf.tracking.metrics import Metrics

POLL_S = 0.5  # between looks at servers that do not answer
NAMED = 4  # tensors that an error lists


@dataclass
class Remote:
    """A server, as far as the trainer knows it."""

    http: JsonHttp
    is_alive: bool = True
    holds: str | None = None  # the version of its weights, if that is certain
    tested: str | None = None  # the version that the canary has compared
    process: LaunchedServer | None = None  # of a server that the run starts
    failure: str = "none"  # why it was left out the last time
    is_shared: bool = False  # whether it was noted that it has had weights of others
    link: Link | None = None  # the sender of its weights; None: it loads them from folders


class ServerPool:
    """The servers of a run. All samplers of the run share it: it knows which weights were pushed last.

    Completions come only from servers that have the weights asked for. A server that dies is left out, and its prompts
    are asked again elsewhere with the same keys, which gives the same completions; one that is back gets the weights
    again. A push or a canary that fails stops the run.
    """

    def __init__(
        self,
        config: Server,
        folder: Path,
        *,
        dtype: str,
        pad_id: int,
        shared: Path | None = None,
        warn: Callable[[str], None] = lambda _: None,
        processes: Sequence[LaunchedServer] = (),
    ) -> None:
        """Prepare the requests; nothing is sent or started.

        Args:
            config: the section of the servers.
            folder: where pushed weights are written; folders in it that are no longer needed are deleted.
            dtype: of the trainer's arithmetic, as policy.dtype.
            pad_id: the id under masks.
            shared: the folder of which the servers know the path, `folder` or one above it; None: `folder`.
            warn: called when a server dies or is back.
            processes: the servers that this run starts, if it does, in the order of the addresses.

        Raises:
            ConfigError: an address is none, or the token is not in the environment.
        """
        secret = None
        if config.token_env is not None:
            secret = os.environ.get(config.token_env)
            if not secret or not secret.isascii() or not secret.isprintable():
                raise ConfigError(
                    f"sampling.server.token_env: put a token (printable ASCII) into the environment variable "
                    f"{config.token_env}"
                )
        self.config, self.dtype, self.pad_id, self.warn = config, dtype, pad_id, warn
        https = [JsonHttp(url, timeout_s=config.timeout_s, secret=secret) for url in config.urls]
        self.remotes = [Remote(http, link=config.link(http)) for http in https]
        for remote, process in zip(self.remotes, processes, strict=False):
            remote.process = process
        self.folders, self._shared = WeightFolders(folder), folder if shared is None else shared
        self.phase: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext()
        self._name = secrets.token_hex(4)  # tells this run's versions from versions of other runs and starts
        self._count = 0
        self._digests: dict[str, str] = {}
        self._delta: tuple[Path, str] | None = None  # the newest folder of changes, and the version that it changes
        self._full: Path | None = None  # a folder with all tensors of this version
        self._prompts: list[list[int]] = []  # the canary's: the same for the whole run, so that stale caches show
        self._lock = threading.RLock()
        self._asked_again, self._canary = 0, 0.0
        self._is_steady = self._is_current = False

    @property
    def version(self) -> str | None:
        """Return the version of the weights that were pushed last; None before the first push."""
        return f"{self._name}.{self._count}" if self._count else None

    @contextmanager
    def sampling_from(self, policy: PushedPolicy, prompts: Sequence[list[int]]) -> Iterator[None]:
        """Make all servers that answer hold the policy's weights, and keep others from changing them in the body.

        `prompts` are of the step, for the canary.

        Raises:
            SamplingError: a push broke, or the canary found a difference.
        """
        with self._lock:
            if not self._prompts:
                self._prompts = self._for_canary(policy, prompts)
            if not self._is_current:
                with self.phase("push"):
                    self._update(policy)
                self._is_current = self._is_steady
            yield

    def _for_canary(self, policy: PushedPolicy, prompts: Sequence[list[int]]) -> list[list[int]]:
        """Return the first prompts; of one that leaves the canary no room in the model's context, the end."""
        context = context_length(policy.model)
        first = prompts[: self.config.canary.prompts]
        if context is None:
            return [list(ids) for ids in first]
        room = context - max(self.config.canary.tokens, TAIL + SPREAD + 1)  # a forced text, and a token after it
        return [list(ids[-max(room, 1) :]) for ids in first]

    @contextmanager
    def steady(self) -> Iterator[None]:
        """Look for changed weights once in the body, and keep others from changing the servers' weights in it.

        The policy must not change in the body, as between the turns of an episode.
        """
        with self._lock:
            self._is_steady, self._is_current = True, False
            try:
                yield
            finally:
                self._is_steady = self._is_current = False

    def _update(self, policy: PushedPolicy) -> None:
        """Find the tensors changed since the last push, write them, and push them to the servers that answer."""
        tensors = policy.tensors()
        digests = {name: tensor_digest(tensor) for name, tensor in tensors.items()}
        if digests != self._digests or not self._count:
            self._write(policy, tensors, digests)
        self._ensure_processes()
        for remote in self.remotes:
            self._bring_up_to_date(remote, policy, tensors)

    def _ensure_processes(self) -> None:
        """Start the servers of this run that do not run, and wait for their answers if no other server answers.

        Raises:
            SamplingError: one ended before it answered, or does not answer in time.
        """
        launched = [(remote, remote.process) for remote in self.remotes if remote.process is not None]
        for remote, process in launched:
            if process.ensure():
                remote.holds = remote.tested = None  # it has the weights of its start
        if self.config.launch is None or any(process.has_answered for _, process in launched):
            return
        until = time.monotonic() + self.config.launch.start_s
        waiting = dict(enumerate(launched))
        while waiting:
            for number, (remote, process) in list(waiting.items()):
                with suppress(ServerDown, ServerRefused):
                    self.config.version(remote.http)
                    process.has_answered = True
                    del waiting[number]
                    continue
                process.ensure()
            if waiting and time.monotonic() > until:
                late = ", ".join(remote.http.url for remote, _ in waiting.values())
                raise SamplingError(
                    f"the sampling server at {late} has not answered {self.config.launch.start_s:g} s after its start "
                    "(sampling.server.launch.start_s); see "
                    + ", ".join(str(process.log) for _, process in waiting.values())
                )
            time.sleep(POLL_S if waiting else 0.0)

    def close(self) -> None:
        """End the servers that this run has started, and leave the others."""
        for remote in self.remotes:
            if remote.link is not None:
                remote.link.close()
            if remote.process is not None:
                remote.process.stop()

    def _write(self, policy: PushedPolicy, tensors: Mapping[str, Tensor], digests: dict[str, str]) -> None:
        changed = {name: tensor for name, tensor in tensors.items() if self._digests.get(name) != digests[name]}
        base = self.version if self.config.takes_changes and len(changed) < len(tensors) else None
        self._count += 1
        self._digests, self._delta, self._full = digests, None, None
        if self.remotes[0].link is not None:
            return
        if base is None or policy.is_adapter:
            folder = self._write_full(policy, tensors)
        else:
            folder = self._write_folder(policy, f"weights-{self._count:06d}", changed, base)
            self._delta = folder, base
        self.folders.moved(changed, folder)
        self.folders.prune({folder})

    def _write_full(self, policy: PushedPolicy, tensors: Mapping[str, Tensor]) -> Path:
        """Write all tensors of this version, unless they are there."""
        if self._full is None:
            self._full = self._write_folder(policy, f"weights-{self._count:06d}-all", tensors, None)
        return self._full

    def _write_folder(self, policy: PushedPolicy, name: str, tensors: Mapping[str, Tensor], base: str | None) -> Path:
        manifest = {"version": self.version, "base": base, "tensors": {key: self._digests[key] for key in tensors}}
        return self.folders.write(
            name, tensors, manifest=manifest, is_adapter=policy.is_adapter, write_config=policy.write_config
        )

    def _bring_up_to_date(self, remote: Remote, policy: PushedPolicy, tensors: Mapping[str, Tensor]) -> None:
        """Push this version to a server that does not have it, and compare its tokens; a dead one is left out.

        Raises:
            SamplingError: the server refuses a request, a push broke, or the canary found a difference.
        """
        was_alive = remote.is_alive
        try:
            known = self.config.version(remote.http)
            if known is not None:
                if remote.holds not in (None, known):
                    self._displace(remote, known)
                remote.holds = known
            elif not was_alive:
                remote.holds = None  # it may have been started again
            if remote.process is not None:
                remote.process.has_answered = True
            if remote.holds != self.version and remote.link is not None:
                self._send(remote, remote.link, tensors)
            elif remote.holds != self.version:
                self._push(remote, policy, tensors)
            remote.is_alive = True
            if remote.tested != self.version and self._test(remote, policy):
                remote.tested = self.version
        except ServerDown as error:
            self._lose(remote, error)
            return
        except ServerRefused as error:
            raise SamplingError(
                f"the sampling server {remote.http.url} does not answer as one of type {self.config.type} does: "
                f"{error}. Check sampling.server.type, the address, and sampling.server.token_env"
            ) from error
        if not was_alive:
            self.warn(f"the sampling server {remote.http.url} answers again, and has the current weights")

    def _send(self, remote: Remote, link: Link, tensors: Mapping[str, Tensor]) -> None:
        """Push all weights past the folder."""
        link.connect(tensors, remote.holds)
        remote.holds = remote.tested = None
        assert self.version is not None
        send = partial(link.send, self.version)
        self.config.push(remote.http, Push(path="", version=self.version, base=None, is_adapter=False, send=send))
        self.folders.written += sum(tensor.nbytes for tensor in tensors.values()) / 1e6
        remote.holds = self.version

    def _push(self, remote: Remote, policy: PushedPolicy, tensors: Mapping[str, Tensor]) -> None:
        if self._delta is not None and remote.holds == self._delta[1]:
            folder, base = self._delta
        else:
            folder, base = self._write_full(policy, tensors), None
        remote.holds = remote.tested = None
        path = self.config.location(folder, self._shared)
        assert self.version is not None
        push = Push(path=path, version=self.version, base=base, is_adapter=policy.is_adapter)
        try:
            try:
                self.config.push(remote.http, push)
            except ServerRefused as error:
                if base is None or error.status != HTTPStatus.CONFLICT:
                    raise
                whole = self._write_full(policy, tensors)  # the server restarted after it reported its version
                path = self.config.location(whole, self._shared)
                self.config.push(remote.http, replace(push, path=path, base=None))
        except ServerRefused as error:
            raise SamplingError(
                f"the sampling server {remote.http.url} could not load the weights in {path}: {error}. It may hold a "
                "mixture of old and new weights, so nothing is sampled from it: start the server again, and check that "
                "it can read this folder (sampling.server.weights_dir)"
            ) from error
        remote.holds = self.version

    def _lose(self, remote: Remote, error: Exception) -> None:
        if remote.is_alive:
            others = any(other.is_alive for other in self.remotes if other is not remote)
            rest = "the others go on" if others else f"the run waits up to {self.config.wait_s:g} s for it"
            self.warn(f"the sampling server {remote.http.url} does not answer ({error}); {rest}")
        remote.is_alive, remote.holds, remote.tested, remote.failure = False, None, None, str(error)

    def _displace(self, remote: Remote, version: str | None) -> None:
        """Let a server that has other weights than this run has pushed get them again, and note it once."""
        remote.holds = remote.tested = None
        remote.failure = (
            f"the sampling server {remote.http.url} has other weights than this run has pushed (version {version}): "
            "another run has pushed to it, or it was started again. It gets the weights of this run again; give each "
            "run a server of its own"
        )
        if not remote.is_shared:
            self.warn(remote.failure)
        remote.is_shared = True

    def _test(self, remote: Remote, policy: PushedPolicy) -> bool:
        """Compare tokens of the server with the trainer's; return False if it got weights of another run meanwhile.

        Raises:
            SamplingError: they differ by more than the bound.
        """
        if not self._prompts:
            return True
        canary, models = self.config.canary, policy.models
        ask = Ask(
            prompts=self._prompts,
            rows=range(len(self._prompts)),
            width=max(map(len, self._prompts)),
            group_size=1,
            key=KEY,
            greedy=False,
            temperature=models.temperature,
            max_new_tokens=canary.tokens,
            stop_ids=(),
            pad_id=self.pad_id,
            batch_size=len(self._prompts),
            adapted=policy.is_adapter,
        )
        forced = [*self._prompts[0], *forced_tail(int(text_config(policy.model).vocab_size))]
        try:
            answer = self.config.generate(remote.http, ask)
            if answer.version not in (None, self.version):
                self._displace(remote, answer.version)
                return False
            wrong = misread(self._prompts, answer)
            if wrong is not None:
                raise SamplingError(
                    f"the sampling server {remote.http.url} does not have the trainer's prompts: {wrong}"
                )
            scored = self.config.score(remote.http, forced, adapted=policy.is_adapter)
        except ServerRefused as error:
            raise SamplingError(
                f"the sampling server {remote.http.url} refuses the canary's request: {error}"
            ) from error
        with evaluation_mode(policy.model):
            reading = compare_with_server(models, self._prompts, answer, forced, scored, pad_id=self.pad_id)
            if reading.largest > canary.bound_for(self.dtype):
                known = self.config.version(remote.http)  # the answer to `score` has none
                if known not in (None, self.version):
                    self._displace(remote, known)
                    return False
                if not self._is_rounding(remote, policy, reading):
                    raise SamplingError(self._explain(remote, policy, reading))
            self._canary = max(self._canary, reading.largest)
        return True

    def _is_rounding(self, remote: Remote, policy: PushedPolicy, reading: CanaryReading) -> bool:
        """Check whether rounding explains a difference; not if the user has set a bound, or a tensor has other bits."""
        if self.config.canary.bound is not None or not is_rounding(policy.models, reading):
            return False
        served = self.config.digests(remote.http)
        return served is None or not differing(self._digests, served)

    def _explain(self, remote: Remote, policy: PushedPolicy, reading: CanaryReading) -> str:
        """Describe a difference that the canary found, with its likely cause."""
        bound = self.config.canary.bound_for(self.dtype)
        text = (
            f"the sampling server {remote.http.url} does not have the trainer's weights, or computes with them "
            f"otherwise: after the push of version {self.version} a log-probability differs by {reading.largest:.2e} "
            f"nats (sampling.server.canary.bound is {bound:g}). Likely: "
        )
        served = self.config.digests(remote.http)
        wrong = [] if served is None else differing(self._digests, served)
        if wrong:
            more = f" and {len(wrong) - NAMED} more" if len(wrong) > NAMED else ""
            text += f"{', '.join(wrong[:NAMED])}{more}: other bits on the server than in the trainer; "
        text += likely_cause(policy.models, reading, self.folders.older())
        if remote.link is not None:
            text += "; old weights, which are in no folder, were not tried"
        arithmetic = self.config.describe_arithmetic(remote.http)
        if arithmetic is not None:
            text += f" (the server computes in {arithmetic}, the trainer in {self.dtype})"
        return text

    def generate(self, asks: Sequence[Ask], policy: PushedPolicy) -> list[Answer]:
        """Answer all requests, inside of `sampling_from`; each is repeated until a server with the weights answers it.

        Raises:
            SamplingError: no server has answered for sampling.server.wait_s, or one refuses a request.
        """
        answers: dict[int, Answer] = {}
        waiting_since: float | None = None
        while len(answers) < len(asks):
            ready = [remote for remote in self.remotes if remote.is_alive and remote.holds == self.version]
            if not ready:
                now = time.monotonic()
                waiting_since = now if waiting_since is None else waiting_since
                if now - waiting_since > self.config.wait_s:
                    is_up = any(remote.is_alive for remote in self.remotes)
                    lack = "has kept the weights of this run" if is_up else "has answered"
                    raise SamplingError(
                        f"no sampling server of {', '.join(self.config.urls)} {lack} for "
                        f"{self.config.wait_s:g} s (sampling.server.wait_s): start one, or raise "
                        "sampling.server.timeout_s if they are slow; the last failures: "
                        + "; ".join(remote.failure for remote in self.remotes)
                    )
                time.sleep(POLL_S)
                self._update(policy)
                continue
            missing = [number for number in range(len(asks)) if number not in answers]
            with ThreadPoolExecutor(len(ready)) as pool:
                shares = [missing[place :: len(ready)] for place in range(len(ready))]
                done = pool.map(partial(self._answer_share, asks), ready, shares)
                drawn = [pair for pairs in done for pair in pairs]
            self._asked_again += len(missing) - len(drawn)
            answers |= dict(drawn)
            if drawn:
                waiting_since = None
        return [answers[number] for number in range(len(asks))]

    def _answer_share(self, asks: Sequence[Ask], remote: Remote, share: Sequence[int]) -> list[tuple[int, Answer]]:
        """Ask a server some of the requests, until it dies or has other weights."""
        answered: list[tuple[int, Answer]] = []
        for number in share:
            try:
                answer = self.config.generate(remote.http, asks[number])
            except ServerDown as error:
                self._lose(remote, error)
                break
            except ServerRefused as error:
                raise SamplingError(f"the sampling server {remote.http.url} refuses a request: {error}") from error
            if answer.version not in (None, self.version):
                self._displace(remote, answer.version)
                break
            answered.append((number, answer))
        return answered

    def take_metrics(self) -> Metrics:
        """Return the metrics since the last call."""
        metrics = Metrics()
        metrics.add("server/canary", self._canary)
        metrics.add("server/pushed_mb", self.folders.take_written())
        metrics.add("server/asked_again", float(self._asked_again))
        metrics.add("server/alive", float(sum(remote.is_alive for remote in self.remotes)))
        self._asked_again, self._canary = 0, 0.0
        return metrics
