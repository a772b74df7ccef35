"""Names such as configs/ppo.yaml mean the working folder's file, or else the one that comes with this project."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from rlhf.config import files
from rlhf.config.files import locate_config, nearest_config, shipped_configs
from rlhf.config.load import load_compare, load_train, read_yaml
from rlhf.config.sections import CRITIC_TO_POLICY_LR
from rlhf.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
MINE = "policy: {lr: 0.125}\n"


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder that is no checkout."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def installed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package as a wheel leaves it: its configurations inside, somebody else's folder `configs` beside it."""
    for name in ("rlhf/configs", "configs"):
        (folder / name).mkdir(parents=True)
        (folder / name / "ppo.yaml").write_text(MINE)
    monkeypatch.setattr(files, "PACKAGE", folder / "rlhf")
    return folder / "rlhf" / "configs"


@pytest.mark.usefixtures("elsewhere")
def test_outside_a_checkout_the_project_s_own_are_meant() -> None:
    for name in ("configs/ppo.yaml", "configs/lab/ppo.yaml"):
        assert locate_config(name).is_absolute()
        assert locate_config(name).read_bytes() == (ROOT / name).read_bytes()
    assert load_train("configs/ppo.yaml", ["policy.lr=0.5"]).policy.lr == 0.5
    assert read_yaml(load_compare("configs/lab/compare_quick.yaml").base)["run"]["name"] == "lab-{algorithm}"


def test_the_working_folder_comes_first(elsewhere: Path) -> None:
    (elsewhere / "configs").mkdir()
    (elsewhere / "configs" / "ppo.yaml").write_text(MINE)
    assert read_yaml("configs/ppo.yaml") == {"policy": {"lr": 0.125}}
    assert read_yaml("configs/dpo.yaml")["algorithm"]["preset"] == "dpo"  # which the folder lacks


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize(
    "path", ["ppo.yaml", "configs", "./runs/configs/ppo.yaml", "configs/../ppo.yaml", "/configs/ppo.yaml"]
)
def test_no_other_name_is_looked_up(path: str) -> None:
    assert locate_config(path) == Path(path)


def test_a_run_folder_stands_for_its_configuration(elsewhere: Path) -> None:
    (elsewhere / "config.yaml").write_text(MINE)
    assert locate_config(elsewhere) == elsewhere / "config.yaml"


def test_a_misspelled_name_has_its_nearest_from_both_places(elsewhere: Path) -> None:
    assert nearest_config("configs/pppo.yaml") == Path("configs/ppo.yaml")
    assert nearest_config("config/lab/ppo.yaml") == Path("configs/lab/ppo.yaml")
    assert nearest_config("ppo.yaml") == Path("configs/ppo.yaml")
    (elsewhere / "configs").mkdir()
    (elsewhere / "configs" / "mine.yaml").write_text(MINE)
    assert nearest_config("configs/mien.yaml") == Path("configs/mine.yaml")
    with pytest.raises(
        ConfigError, match=r"no configuration file 'configs/lab/pqo.yaml'; did you mean configs/lab/ppo"
    ):
        read_yaml("configs/lab/pqo.yaml")
    with pytest.raises(ConfigError, match=r"configs is a folder without config.yaml or compare.yaml: name a YAML file"):
        read_yaml("configs")


def test_an_installed_package_has_its_own_inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = installed(tmp_path / "site-packages", monkeypatch)
    assert shipped_configs() == own
    (own / "ppo.yaml").unlink()
    (own.parents[1] / "configs" / "ppo.yaml").unlink()
    with pytest.raises(ConfigError, match="reinstall the package"):
        shipped_configs()


def test_the_wheel_puts_them_where_they_are_looked_for() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wheel = settings["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel["force-include"] == {"configs": "rlhf/configs", "configs/lab": "rlhf/lab/configs"}
    assert wheel["packages"] == ["rlhf", "reward_model"]


@pytest.mark.parametrize(
    "file", ["configs/ppo.yaml", "configs/real/detox_ppo.yaml", "configs/recipes/qwen2.5_0.5b/ppo.yaml"]
)
def test_the_critic_s_rate_follows_the_policy_s(file: str) -> None:
    assert load_train(ROOT / file, ["policy.lr=4e-5"]).critic.lr == 2e-4


def test_no_file_pins_the_critic_s_rate_at_the_value_of_the_rule() -> None:
    pinned = {}
    for file in sorted((ROOT / "configs").rglob("*.yaml")):
        tree = read_yaml(file)
        if "lr" in (tree.get("critic") or {}):
            pinned[str(file.relative_to(ROOT))] = tree["critic"]["lr"] / tree["policy"]["lr"]
    assert set(pinned) >= {"configs/lab/ppo.yaml", "configs/agent_guess.yaml"}  # rates of their own
    assert [file for file, ratio in pinned.items() if ratio == pytest.approx(CRITIC_TO_POLICY_LR)] == []
