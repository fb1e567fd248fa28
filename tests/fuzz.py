"""Wrong arguments, damaged files and kills at random moments, for as long as asked.

`python tests/fuzz.py --seconds 120`: a share of the time for each. What is wrong must end in a
ValueError or a `deltarule: error:` of one line; what is killed goes on to the same bits. A failure
prints the number that brings it back: `python tests/fuzz.py --only files --first 17 --seconds 0`.
"""

import argparse
import contextlib
import io
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import typing
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import deltarule
from deltarule.cli import COMMANDS, main
from deltarule.config_file import flags_of
from deltarule.nn import load_state
from oracle import make_case
from small import FLAGS

TINY = [*FLAGS, "--evaluate-every", "2", "--save-every", "2"]
MQAR = ["--batch-rows", "4", "--evaluation-rows", "8", "--hidden-size", "8", "--num-heads", "1"]
WORDS = (
    "", "0", "-1", "1", "3", "7.5", "nan", "inf", "-inf", "1e-45", "1e400", "9" * 25, "None",
    "true", "auto", "cpu", "cuda:9", "meta", "kda", "attention", "nothing", "../x", "a/b", ".",
    "/dev/null", "/proc/self/mem", "\udcff", "\u00e9", "[1]", "-", "--", "x" * 5000,
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 3, 2**70, 0.5, float("nan"), float("inf"), "x", b"x", [], [1], {}, object(),
)  # fmt: skip
# What a command may leave with.
CODES = {0, 1, 2}


class Scratch(typing.NamedTuple):
    """A folder with a text and a finished run to damage."""

    folder: Path
    text: Path
    run: Path


def other_tensor(x: torch.Tensor, dice: random.Random) -> Any:
    """A tensor like it but for one thing."""
    kinds: list[Callable[[], Any]] = [
        lambda: x[..., :0], lambda: x[:, :1], lambda: x.unsqueeze(0), lambda: x.long(),
        lambda: x.half(), lambda: x.double(), lambda: x.to("meta"), lambda: x.to_sparse(),
        lambda: x * float("nan"), lambda: x * 1e38, lambda: x.mT, lambda: x.flatten(),
        lambda: torch.nested.nested_tensor([x[0], x[0]]), lambda: x.numpy(), lambda: x.bool(),
        lambda: x.to(torch.complex64), lambda: x.expand(2, *x.shape), lambda: x.requires_grad_(),
    ]  # fmt: skip
    return dice.choice(kinds)()


def arguments(dice: random.Random, scratch: Scratch) -> str:
    """Call an operator or a layer, or give a command, with something wrong."""
    if dice.random() < 0.4:
        return flags(dice, scratch)
    case = make_case(
        dice.choice(["none", "head", "channel"]), dice.choice(["none", "tied", "free"]),
        batch=1, tokens=dice.choice([1, 5]), dtype=torch.float32,
    )  # fmt: skip
    given: dict[str, Any] = {name: x.clone() for name, x in case.tensors.items() if x is not None}
    a, b = given.pop("a", None), given.pop("b", None)
    call: Callable[..., Any] = deltarule.delta_rule
    if a is not None and dice.random() < 0.5:
        call, given = deltarule.dplr, given | {"a": a, "b": b}
        given.pop("beta", None)
    elif dice.random() < 0.3:
        state = given.pop("initial_state", torch.zeros(1, 4, 6, 8))
        call, given = deltarule.recurrent_step, given | {"state": state}
    if call is not deltarule.dplr:
        given.setdefault("beta", None)
    given |= {"scale": None, "impl": "auto"}
    name = dice.choice(list(given))
    tensor = given[name]
    if isinstance(tensor, torch.Tensor) and dice.random() < 0.7:
        given[name] = other_tensor(tensor, dice)
    else:
        given[name] = dice.choice(VALUES)
    one_line(lambda: call(given.pop("q"), given.pop("k"), given.pop("v"), **given))
    return f"{call.__name__}({name})"


def one_line(call: Callable[[], Any]) -> None:
    """It works, or raises a ValueError of one line."""
    said = ""
    try:
        call()
    except ValueError as error:
        said = str(error)
    assert "\n" not in said, said


def flags(dice: random.Random, scratch: Scratch) -> str:
    """A command with one to three odd flags."""
    name = dice.choice(["train text", "train mqar", "generate", "eval", "rules", "explain", "plan"])
    words = name.split()
    if name == "train text":
        words += ["--data", str(scratch.text), *TINY, "--steps", "2"]
    elif name == "train mqar":
        words += [*MQAR, "--steps", "2"]
    elif name in ("generate", "eval"):
        words += [str(scratch.run)]
        words += ["--max-new-tokens", "4"] if name == "generate" else ["--max-bytes", "300"]
    else:
        words += ["--tokens", "8"] if name == "explain" else []
    for _ in range(dice.randint(1, 3)):
        flag = dice.choice([*flags_of(COMMANDS[name].flags)])
        words += [f"--{flag.replace('_', '-')}", dice.choice(WORDS)]
    command(words)
    return " ".join(words)[:300]


def command(words: list[str]) -> None:
    """A command ends with a code, and an error of it is one line."""
    said = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace")
    told = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace")
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(told):
        try:
            code = main(words)
        except SystemExit as left:
            code = left.code
            # What tyro draws around a wrong flag has many lines.
            assert code in CODES, (words, code)
            return
    said.seek(0)
    error = said.read()
    assert code in CODES, (words, code)
    assert "Traceback" not in error, (words, error)
    # Of what is not expected, only memory that is not there is nobody's mistake.
    unexpected = re.match(r"deltarule: error: \w+(Error|Exception): (?!.*(alloc|memory))", error)
    assert not unexpected, (words, error)
    if code == 1:
        first, *rest = [x for x in error.splitlines() if "Warning" not in x and x[:2] != "  "] or [
            ""
        ]
        assert first.startswith("deltarule: "), (words, error)
        assert not rest or "continue with" in first, (words, error)


def files(dice: random.Random, scratch: Scratch) -> str:
    """Damage a file of a run, then use the run."""
    folder = scratch.folder / "runs" / "damaged"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(scratch.run, folder)
    file = dice.choice(sorted(path for path in folder.rglob("*") if path.is_file()))
    how = damage(file, dice)
    uses = [
        ["generate", str(folder), "--max-new-tokens", "3"],
        ["eval", str(folder), "--max-bytes", "300"],
        ["train", "text", "--runs", str(folder.parent), "--name", "damaged", "--resume",
         "--steps", "6"],
        ["plot", "attention", str(folder), "--text", "ab"],
    ]  # fmt: skip
    words = dice.choice(uses)
    if file.suffix == ".safetensors":
        with contextlib.suppress(ValueError):
            load_state(file)
    command(words)
    return f"{how} {file.relative_to(folder)}; {' '.join(words[:2])}"


def damage(file: Path, dice: random.Random) -> str:
    """Change one file somehow; say how."""
    content = file.read_bytes()
    how = dice.choice(
        ["flip", "cut", "insert", "empty", "remove", "folder", "json", "json", "json"]
    )
    if how == "json" and (file.suffix in (".json", ".jsonl") or file.name == "COMPLETE"):
        with contextlib.suppress(ValueError):
            file.write_text(json.dumps(changed(json.loads(content), dice), default=str))
            return how
    place = dice.randrange(len(content)) if content else 0
    if how == "flip" and content:
        file.write_bytes(content[:place] + bytes([content[place] ^ 1 << dice.randrange(8)])
                         + content[place + 1 :])  # fmt: skip
    elif how == "cut":
        file.write_bytes(content[:place])
    elif how == "empty":
        file.write_bytes(b"")
    else:
        file.unlink()
        if how == "folder":
            file.mkdir()
        elif how != "remove":
            extra = dice.choice([b"\xff\xfe", b"\0" * 9, b"[" * 99_999, b"9" * 9_999, b"\n{}\n"])
            file.write_bytes(content[:place] + extra + content[place:])
    return how


def changed(value: Any, dice: random.Random) -> Any:
    """A JSON value with one part of it replaced, renamed or left out."""
    inner = list(value) if isinstance(value, dict) else []
    inner = list(range(len(value))) if isinstance(value, list) else inner
    if not inner or dice.random() < 0.2:
        return dice.choice([None, True, -1, 2**70, 0.5, float("nan"), "x", [], {}])
    key = dice.choice(inner)
    if dice.random() < 0.1:
        del value[key]
    else:
        value[key] = changed(value[key], dice)
    return value


def kills(dice: random.Random, scratch: Scratch) -> str:
    """Kill a run at a random moment, resume it: it ends with the bits of one that was not."""
    words = ["train", "text", "--data", str(scratch.text), *TINY, "--steps", "40"]
    straight = scratch.folder / "straight"
    line = [sys.executable, "-m", "deltarule", *words, "--runs"]
    if not straight.exists():
        subprocess.run([*line, str(straight)], check=True, capture_output=True)
    folder = scratch.folder / "killed"
    shutil.rmtree(folder, ignore_errors=True)
    process = subprocess.Popen([*line, str(folder)], stdout=subprocess.DEVNULL)
    run, seconds = folder / "text", dice.uniform(0, 1.5)
    while process.poll() is None and not (run / "run.json").exists():
        time.sleep(0.01)
    time.sleep(seconds)
    process.kill()
    process.wait()
    subprocess.run([*line, str(folder), "--resume"], check=True, capture_output=True)
    for name in ("model.safetensors", "config.json"):
        assert (run / name).read_bytes() == (straight / "text" / name).read_bytes(), name
    return f"after {seconds:.2f} s"


FUZZERS = {"arguments": arguments, "files": files, "kills": kills}


def prepare(folder: Path) -> Scratch:
    """A text and a finished run."""
    text = folder / "text.txt"
    text.write_text("the cat sat on the mat and so on\n" * 100)
    words = ["train", "text", "--data", str(text), *TINY, "--steps", "4"]
    with contextlib.redirect_stdout(io.StringIO()):
        assert main([*words, "--runs", str(folder / "made")]) == 0
    return Scratch(folder, text, folder / "made" / "text")


def fuzz(name: str, first: int, seconds: float, scratch: Scratch) -> int:
    """Trials of one kind until the time is over; the number of failures."""
    began, number, failures = time.monotonic(), first, 0
    while number == first or time.monotonic() - began < seconds:
        dice = random.Random(f"{name} {number}")
        torch.manual_seed(number)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                FUZZERS[name](dice, scratch)
        except Exception as error:
            failures += 1
            print(f"FAILED: --only {name} --first {number}: {type(error).__name__} {error!s:.600}")
        number += 1
    print(f"{name}: {number - first} trials from {first}, {failures} failed, "
          f"{time.monotonic() - began:.0f} s", flush=True)  # fmt: skip
    return failures


def run() -> int:
    """Read the flags, do all kinds or one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--only", choices=FUZZERS)
    parser.add_argument("--first", type=int, help="number of the first trial; none draws one")
    given = parser.parse_args()
    first = random.SystemRandom().randrange(10**9) if given.first is None else given.first
    names = [given.only] if given.only else list(FUZZERS)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        scratch = prepare(Path(folder))
        share = given.seconds / len(names)
        return min(1, sum(fuzz(name, first, share, scratch) for name in names))


if __name__ == "__main__":
    sys.exit(run())
