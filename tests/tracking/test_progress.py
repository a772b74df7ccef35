"""The display on a terminal and off it, the clock of the phases, and text that must not act on the terminal."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from rlhf.tracking.progress import Progress, printable


class Clock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def terminal() -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=True, force_interactive=True, width=100, color_system=None), out


def plain_console() -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=False), out


METRICS = {"score/mean": 0.53, "kl/reference": 5.912, "loss/policy": 0.1, "policy/lr": 1e-6}


def test_a_plain_line_has_step_metrics_speed_and_time_left() -> None:
    console, out = plain_console()
    clock = Clock()
    with Progress("ppo", 80, console, clock=clock) as progress:
        for step in (1, 2):
            clock.now += 21.0
            progress.update(step, METRICS, ["score/mean", "kl/reference", "loss/policy"])
    assert out.getvalue().splitlines() == [
        "step 1/80  score 0.53  kl 5.91  loss 0.10  21 s/step  eta 27m39s",
        "step 2/80  score 0.53  kl 5.91  loss 0.10  21 s/step  eta 27m18s",
    ]


def test_without_a_terminal_there_is_a_line_every_ten_seconds_and_at_both_ends() -> None:
    console, out = plain_console()
    clock = Clock()
    with Progress("ppo", 1500, console, clock=clock) as progress:
        for step in range(1, 1501):
            clock.now += 0.125
            progress.update(step, METRICS, ["loss/policy"])
    steps = [int(line.split()[1].split("/")[0]) for line in out.getvalue().splitlines()]
    assert steps == [1, *range(81, 1500, 80), 1500]


def test_an_evaluation_has_a_line_of_its_own_and_so_has_the_last_update_of_a_run_that_stops() -> None:
    console, out = plain_console()
    clock = Clock()
    with Progress("ppo", 80, console, clock=clock) as progress:
        for step, metrics in enumerate([{}, {}, {"eval/score": 0.5}, {}, {}]):
            clock.now += 1.0
            progress.update(step, metrics, ["eval/score"])
        assert [line.split()[1] for line in out.getvalue().splitlines()] == ["0/80", "2/80"]
    assert [line.split()[1] for line in out.getvalue().splitlines()] == ["0/80", "2/80", "4/80"]


def test_a_resumed_run_is_timed_from_where_it_resumed() -> None:
    console, out = plain_console()
    clock = Clock()
    with Progress("ppo", 80, console, start_step=40, clock=clock) as progress:
        clock.now += 3.0
        progress.update(42, {}, [])
    assert out.getvalue() == "step 42/80  1.5 s/step  eta 57s\n"


def test_speed_is_that_of_the_recent_updates() -> None:
    console, out = plain_console()
    clock = Clock()
    with Progress("ppo", 100, console, clock=clock) as progress:
        clock.now += 500.0  # the first step compiles
        for step in range(1, 51):
            progress.update(step, {}, [])
            clock.now += 1.0
    assert out.getvalue().splitlines()[-1] == "step 50/100  1 s/step  eta 50s"


def test_the_last_step_has_no_time_left_and_step_zero_no_speed() -> None:
    console, out = plain_console()
    clock = Clock()
    with Progress("ppo", 1, console, clock=clock) as progress:
        progress.update(0, {"eval/score": 0.5}, ["eval/score"])
        clock.now += 1.0
        progress.update(1, {}, [])
    assert out.getvalue().splitlines() == ["step 0/1  eval/score 0.50", "step 1/1  1 s/step"]


def test_targets_stand_beside_their_metrics_and_absent_metrics_are_left_out() -> None:
    console, out = plain_console()
    with Progress("ppo", 8, console, targets={"kl/reference": 6.0}) as progress:
        progress.update(0, METRICS, ["kl/reference", "critic/explained_variance"])
    assert out.getvalue() == "step 0/8  kl 5.91 (target 6.00)\n"


def test_two_metrics_of_one_short_name_are_called_by_their_own() -> None:
    console, out = plain_console()
    with Progress("ppo", 8, console) as progress:
        progress.update(0, {"loss/policy": 1.0, "loss/total": 2.0}, ["loss/policy", "loss/total"])
    assert out.getvalue() == "step 0/8  loss/policy 1.00  loss/total 2.00\n"


def test_plain_lines_are_not_wrapped_at_the_width_of_a_terminal() -> None:
    console, out = plain_console()
    with Progress("ppo", 8, console) as progress:
        progress.note("x" * 300)
    assert out.getvalue() == "x" * 300 + "\n"


@pytest.mark.parametrize("make", [terminal, plain_console])
def test_text_is_printed_as_it_stands_and_cannot_steer_the_terminal(make: type) -> None:
    console, out = make()
    with Progress("[red]run[/red]\x1b[2J", 8, console) as progress:
        progress.note("[bold]hi[/bold] [/oops] :smile: \x1b[31mred\x07 \ud83d")
        progress.update(1, {"my[b]metric": 1.0}, ["my[b]metric"])
    shown = out.getvalue()
    assert "[bold]hi[/bold] [/oops] :smile: ␛[31mred␇ ?" in shown
    assert "my[b]metric 1.00" in shown
    assert "\x1b[2J" not in shown
    assert "\x1b[31m" not in shown
    assert "\x07" not in shown


def test_the_terminal_shows_title_bar_metrics_and_the_running_phase() -> None:
    console, out = terminal()
    clock = Clock()
    with Progress("ppo-hh", 80, console, clock=clock, targets={"kl/reference": 6.0}) as progress:
        with progress.phase("sample"):
            clock.now += 2.0
            progress.update(12, METRICS, ["score/mean", "kl/reference"])
            during = out.getvalue()
        progress.note("a warning")
    for expected in ("ppo-hh", "12/80", "━", "score 0.53", "kl 5.91 (target 6.00)", "▸ sample", "eta"):
        assert expected in during
    after = out.getvalue()[len(during) :]
    assert after.index("a warning") < after.index("ppo-hh")  # above the display, which is drawn again
    assert after.rstrip().endswith("\x1b[?25h")  # the cursor is given back


def test_the_display_ends_when_the_run_fails() -> None:
    console, out = terminal()
    with pytest.raises(RuntimeError, match="boom"), Progress("ppo", 8, console):
        raise RuntimeError("boom")
    assert out.getvalue().rstrip().endswith("\x1b[?25h")


def test_a_quiet_console_prints_nothing_but_keeps_time() -> None:
    out = io.StringIO()
    clock = Clock()
    with Progress("ppo", 8, Console(file=out, quiet=True), clock=clock) as progress:
        with progress.phase("sample"):
            clock.now += 2.0
        progress.update(1, METRICS, list(METRICS))
        progress.note("nothing")
        assert progress.take_timings() == {"sample": 2.0}
    assert out.getvalue() == ""


def test_phases_add_up_each_moment_counted_once() -> None:
    clock = Clock()
    progress = Progress("ppo", 8, Console(quiet=True), clock=clock)
    for _ in range(2):
        with progress.phase("sample"):
            clock.now += 1.0
    clock.now += 64.0  # outside every phase
    with progress.phase("update"):
        clock.now += 4.0
        with progress.phase("reward"):
            clock.now += 8.0
        clock.now += 16.0
    assert progress.take_timings() == {"sample": 2.0, "update": 20.0, "reward": 8.0}
    assert progress.take_timings() == {}


def test_timings_taken_within_a_phase_are_split_there() -> None:
    clock = Clock()
    progress = Progress("ppo", 8, Console(quiet=True), clock=clock)
    with progress.phase("update"):
        clock.now += 1.0
        assert progress.take_timings() == {"update": 1.0}
        clock.now += 2.0
    assert progress.take_timings() == {"update": 2.0}


def test_a_phase_that_raises_is_closed() -> None:
    clock = Clock()
    progress = Progress("ppo", 8, Console(quiet=True), clock=clock)

    def interrupted() -> None:
        with progress.phase("sample"):
            clock.now += 1.0
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    clock.now += 5.0
    assert progress.take_timings() == {"sample": 1.0}


@given(st.text(st.characters(codec=None)))
def test_printable_text_is_utf8_without_controls(text: str) -> None:
    shown = printable(text)
    assert len(shown) == len(text)
    assert not [letter for letter in shown if (ord(letter) < 32 or 127 <= ord(letter) < 160) and letter not in "\n\t"]
    shown.encode("utf-8")
    assert printable(shown) == shown


def test_a_text_cannot_show_its_letters_in_another_order() -> None:
    assert printable("score \u202e 9.9") == "score \N{REPLACEMENT CHARACTER} 9.9"
    assert printable("שלום \u2068abc\u2069") == "שלום \u2068abc\u2069"  # isolates and right-to-left letters are text
