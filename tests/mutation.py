"""Plants faults in cuda_src/, one at a time, and counts how many the CPU executor's problems catch.

    python tests/mutation.py [--mutants N] [--seed S] [--only FILE ...]

The faults are mechanical and seeded: a barrier dropped, an index shifted, operands swapped, a bound or a constant
changed, a guard dropped, a statement left out. Each mutant runs `problems_for` its file in checked mode (those of
activations.cuh the tests of its functions before) until one fails, in a process of its own, because a wild write or an
endless loop is a result too. Mutants that do not compile do not count. bench/results/mutation.json records the score;
it keeps what is said there about the survivors.
"""

import argparse
import contextlib
import hashlib
import itertools
import json
import multiprocessing
import os
import random
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import test_activations
import test_mamba_ops
import test_selective_vjp
import test_state_update

from cuscan import _source
from cuscan.testing import Host, Plan, fuzz, host, problems
from cuscan.testing.host import HostModules, _build

RECORD = Path(__file__).parent.parent / "bench" / "results" / "mutation.json"
SECONDS = 400  # a mutant
FILES = (
    "operators.cuh", "warp_scan.cuh", "activations.cuh", "selective_tile.cuh", "selective_scan.cu", "item_types.cuh",
    "tile_io.cuh", "run_stream.cuh", "linear_scan.cu", "linear_tile.cuh", "step_marks.cu", "step_marks.cuh",
    "selective_state_update.cu", "selective_scan_backward.cu", "linear_scan_backward.cu", "sum_partials.cu",
    "causal_conv1d.cuh", "causal_conv1d.cu", "causal_conv1d_backward.cu", "rms_norm.cuh", "rms_norm.cu",
    "rms_norm_backward.cu", "matrix_vector.cu",
)  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One line, changed."""

    file: str
    number: int
    kind: str
    before: str
    after: str


# --- mutants -----------------------------------------------------------------------------------------------------

_OPPOSITE = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "&&": "||", "||": "&&"}
_OTHER = {"+": "-", "-": "+", "*": "+", "/": "*", "%": "/", "&": "|", "|": "&", ">>": "<<", "<<": ">>"}
# An argument without calls in it.
_PLAIN = r"([\w.\[\]:<>]+)"
RULES = [
    ("barrier dropped", re.compile(r"__sync(?:threads|warp)\(.*?\);"), lambda _: ";"),
    ("bound changed", re.compile(r" (<=?|>=?|==|!=) "), lambda m: f" {_OPPOSITE[m[1]]} "),
    ("guard changed", re.compile(r" (&&|\|\|) "), lambda m: f" {_OPPOSITE[m[1]]} "),
    ("guard dropped", re.compile(r"\bif (?:constexpr )?\(((?:[^()]|\([^()]*\))*)\)"), lambda _: "if (true)"),
    ("guard negated", re.compile(r"\bif \(((?:[^()]|\([^()]*\))*)\)"), lambda m: f"if (!({m[1]}))"),
    ("choice swapped", re.compile(r" \? ([^?:;]+) : ([^?:;,]+?)(?=[;,)])"), lambda m: f" ? {m[2]} : {m[1]}"),
    ("operands swapped", re.compile(rf"\b(combine|apply)\({_PLAIN}, {_PLAIN}\)"), lambda m: f"{m[1]}({m[3]}, {m[2]})"),
    (
        "operands swapped",
        re.compile(r"\b(multiply_add|fma|fmaf)\(([^(),]+), ([^(),]+), ([^(),]+)\)"),
        lambda m: f"{m[1]}({m[4]}, {m[3]}, {m[2]})",
    ),
    ("arithmetic changed", re.compile(r" ([+*/%&|-]|<<|>>) "), lambda m: f" {_OTHER[m[1]]} "),
    ("index shifted", re.compile(r"(?<=\w)\[(\w+)\]"), lambda m: f"[{m[1]} + 1]"),
    ("constant changed", re.compile(r"(?<![\w.])(\d+)(?![\w.])"), lambda m: str(int(m[1]) + 1)),
    ("statement dropped", re.compile(r"^\s*(?!return)[\w.\[\]>-]+(?: [-+*^|]?= [^{}]*|\([^{}]*\));$"), lambda _: ";"),
    ("statement dropped", re.compile(r"\b(continue|\w+\.advance\(\));"), lambda _: ";"),
]
_DECLARATION = re.compile(
    r"^\s*(?:const |constexpr |static |alignas\(.*?\) |__shared__ )*[\w:<>, ]+ [*&]?\w+(\[.*?\])+;"
)
_SKIPPED = re.compile(r"^\s*(?:#|//|static_assert|template|using|enum|constexpr|static constexpr|case |extern)|^ *\"")


def code_lines(text):
    """Number, where the code begins and the line, of what runs on the CPU."""
    device = [False]
    for number, line in enumerate(text.splitlines(), start=1):
        if re.match(r"#if", line):
            device.append("__CUDA_ARCH__" in line)
        elif line.startswith("#else"):
            device[-1] = False
        elif line.startswith("#endif"):
            device.pop()
        code = line.partition("//")[0].rstrip()
        if any(device) or not code.strip() or _SKIPPED.match(line):
            continue
        begin = 0
        if "__device__" in code or re.match(r"\s*struct ", code):
            if "{" not in code:
                continue
            begin = code.index("{")
        yield number, begin, code


def all_mutants(files=FILES):
    """Every mutant that the rules make."""
    for file in files:
        for number, begin, code in code_lines((_source.folder() / file).read_text()):
            for kind, pattern, change in RULES:
                if kind in ("index shifted", "constant changed") and _DECLARATION.match(code):
                    continue
                for match in pattern.finditer(code, begin):
                    after = code[: match.start()] + change(match) + code[match.end() :]
                    if after != code:
                        yield Mutant(file, number, kind, code.strip(), after.strip())


def chosen(file, seed):
    """The mutants of a file in the order of their turn: kinds by turns, by lot within them."""
    groups = {}
    everything = sorted(set(all_mutants([file])), key=repr)
    random.Random(seed).shuffle(everything)
    for mutant in everything:
        groups.setdefault(mutant.kind, []).append(mutant)
    while groups:
        for kind in list(groups):
            yield groups[kind].pop()
            if not groups[kind]:
                del groups[kind]


def quotas(total):
    """How many mutants of each file: as many as its share of all, and some of the small ones."""
    possible = Counter(mutant.file for mutant in all_mutants())
    return {file: max(8, round(total * possible[file] / possible.total())) for file in FILES}


# --- the problems ------------------------------------------------------------------------------------------------


def problems_for(file):
    """What a mutant of a file runs: every schedule and type of the kernels that it is in or launched with."""
    launched = {"sum_partials.cu": "backward", "step_marks.cu": "scan", "": "scan"}
    families = {
        "linear_scan.cu": linear_problems,
        "selective_scan.cu": selective_problems,
        "linear_scan_backward.cu": linear_gradient_problems,
        "selective_scan_backward.cu": selective_gradient_problems,
    }
    drawn = []
    for kernel, problems_of in families.items():
        included = {kernel}
        _source._flatten(kernel, included)
        if file in included or (file in launched and launched[file] in kernel):
            drawn += problems_of()
    return drawn


def linear_problems():
    """By type; the first of each have no layouts to get right, and go over several tiles and chunks."""
    for dtype in problems.dtypes():
        for number, lanes in enumerate(("rows", "time")):
            plans = (
                Plan("block", lanes, row_warps=2, warps=4),
                Plan("block", lanes, row_warps=1, warps=2),
                Plan("split", lanes, chunk=100, row_warps=1),
                Plan("split", lanes, chunk=160, row_warps=4),
            )
            shape = (2, 1100, 37) if lanes == "rows" else (3, 2400)
            h0 = problems.Layout()
            yield problems.LinearProblem(number, shape, 1, dtype=dtype, h0=h0, plans=plans)
            yield problems.LinearProblem(
                number, (*shape[:1], 130, *shape[2:]), 1, reverse=True, dtype=dtype, plans=plans
            )
        source = random.Random(dtype)
        for _ in range(16):
            yield problems.draw_linear(source.choice, source.randint, dtype=(dtype,), largest=4096)


def selective_problems():
    """Chunks that begin where something is forgotten. Then by type, layout and what is constant; of these every other
    one is of the kind that has short cuts in the kernels."""
    source = random.Random(0)
    plain = problems.Layout()
    plans = (Plan("split", chunk=32), Plan("split", chunk=64), Plan("serial"))
    cut = problems.SelectiveProblem(length=192, h0=plain, states=True, plans=plans)
    for layout, state in (("bld", 16), ("bdl", 16), ("bdl", 64)):
        packed = replace(cut, layout=layout, channels=32, state=state, cu_seqlens=plain)
        yield replace(packed, lengths=(20, 12, 64, 0, 4, 91))
    for seed in (5, 13, 25, 28):  # few resets, and masks of half of the steps and more
        reset = replace(cut, seed=seed, batch=2, channels=5, state=3, reset=plain)
        yield replace(reset, reverse=seed % 2 == 1, mask=plain if seed > 13 else None)
    kinds = [("float32", "bld", False, constant) for constant in ("", "BC", "B", "C")]
    kinds += [("float32", "bld", True, constant) for constant in ("", "BC")]
    kinds += [("float32", "bdl", False, "")]
    kinds += [(dtype, layout, False, "") for dtype in ("bfloat16", "float64") for layout in ("bld", "bdl")]
    kinds += [("float16", "bld", False, ""), ("bfloat16", "bdl", True, "")]
    for dtype, layout, is_complex, constant in kinds:
        for number in range(8):
            problem = problems.draw_selective(source.choice, source.randint, dtype=(dtype,), largest=1000)
            if number % 2:
                problem = problems._usual(source.choice, source.randint, problem)
            problem = replace(problem, layout=layout, complex=is_complex, constant=constant, B=plain, C=plain)
            plans = tuple(problems._selective_plan(source.choice, problem) for _ in range(2))
            yield replace(problem, plans=plans)


def linear_gradient_problems():
    """As those of the scans, with the gradients of broadcast gates."""
    for number, (dtype, lanes) in enumerate(itertools.product(problems.dtypes(), ("rows", "time"))):
        shape = (2, 300, 64) if lanes == "rows" else (3, 1100)
        laid = problems.Layout()
        plans = (Plan("block", lanes, row_warps=2, warps=4), Plan("split", lanes, chunk=100, row_warps=1))
        for gate in (laid, problems.Layout(steps=tuple(int(d == 1) for d in range(len(shape)))), 1.0):
            of = problems.LinearProblem(number, shape, 1, dtype=dtype, a=gate, h0=laid, plans=plans)
            yield problems.LinearGradientProblem(of, grad_last=laid)
        source = random.Random(dtype)
        for _ in range(8):
            drawn = problems.draw_linear(source.choice, source.randint, dtype=(dtype,), largest=2000)
            yield problems.draw_gradients(source.choice, source.randint, drawn)


def selective_gradient_problems():
    """By kind: two tiles and a part of one, several slices of states, whole tiles, and packed sequences."""
    given = test_selective_vjp
    for seed, (name, kind) in enumerate(given.KINDS.items()):
        if name in ("bfloat16 time", "bfloat16 complex segmented", "float32 time segmented"):
            continue  # others together have all that is in these
        yield given.problem(2, 77, 69, 5, seed=seed, plans=given.CHUNKS, **given.EXACT, **kind)
        yield given.problem(2, 40, 5, 20, seed=seed, plans=given.CHUNKS[:2], **given.EVERYTHING, **kind)
        yield given.problem(1, 70, 5, 3, seed=seed, grad=None, **given.EVERYTHING, **kind)
        yield given.problem(1, 64, 32, 16, seed=seed, grad_last=None, D=given.LAID, z=given.LAID, **kind)
        if "segmented" in name:
            fields = {**given.EXACT, **given.PACKED, **kind, "groups": 2, "reverse": seed % 2 == 0}
            yield given.problem(1, 90, 6, 4, seed=seed, plans=given.CHUNKS[:2], **fields)


# --- running -----------------------------------------------------------------------------------------------------


class TrimmedModules(HostModules):
    """Compiles a kernel alone, without the module's others."""

    def get_function(self, source, name):
        text, rule, tail = source.text.partition('#line 1 "instantiations"')
        entries = re.split(r'\n(?=extern "C")', tail)
        kept = [entry for entry in entries[1:] if re.search(rf"\b{name}\(", entry)]
        kept = [re.split(r"\nstatic_assert", entry)[0] for entry in kept]
        return super().get_function("\n".join([text + rule, *kept]) + "\n", name)


def executor(order, seed=0):
    """A `Host` that compiles only what it runs."""
    made = Host("checked-O0", order, seed)
    made.__dict__["modules"] = TrimmedModules("checked-O0", order=order, seed=seed, timeout=20)
    return made


def try_mutant(mutant, to):
    """In a process of its own: send (result, detail)."""
    with tempfile.TemporaryDirectory() as scratch:
        if mutant is not None:
            folder = Path(shutil.copytree(_source.folder(), Path(scratch) / "cuda_src"))
            lines = (folder / mutant.file).read_text().splitlines()
            lines[mutant.number - 1] = mutant.after
            (folder / mutant.file).write_text("\n".join(lines) + "\n")
            for function in vars(_source).values():  # what importing the tests made of the right files
                getattr(function, "cache_clear", lambda: None)()
            _source.folder = lambda: folder
        # Neither in the log of the caller: sanitizers write to it what they find.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        own = {
            "activations.cuh": test_activations.check_all,
            "selective_state_update.cu": lambda: test_state_update.check_all(executor("forward").modules),
        }
        around = ("causal_conv1d", "rms_norm", "matrix_vector")
        own |= {
            file: lambda: test_mamba_ops.check_all(executor("forward").modules)
            for file in FILES
            if file.startswith(around)
        }
        for file, check in own.items():
            if mutant is not None and mutant.file != file:
                continue
            try:
                check()
            except (AssertionError, host.KernelError) as error:
                to.send(("killed", f"{type(error).__name__} by the tests of its own"))
                return
            except host.CompileError as error:
                to.send(("does not compile", str(error)[:300]))
                return
        if mutant is not None and mutant.file == "selective_state_update.cu":
            to.send(("survived", ""))
            return
        for number, problem in enumerate(problems_for(mutant.file if mutant else "")):
            error = fuzz.error_of(problem, executor("random" if number % 3 == 2 else "forward", number))
            if isinstance(error, host.CompileError):
                to.send(("does not compile", str(error)[:300]))
                return
            if error is not None:
                to.send(("killed", f"{type(error).__name__} by problem {number}"))
                return
    to.send(("survived", ""))


def result_of(mutant):
    """What became of a mutant: killed, survived or does not compile; and by what."""
    start, end = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=try_mutant, args=(mutant, end))
    child.start()
    end.close()
    result = ("killed", "time limit")
    if start.poll(SECONDS if mutant else 5 * SECONDS):  # without a fault everything is compiled and run
        try:
            result = start.recv()
        except EOFError:
            child.join()
            result = ("killed", f"exit status {child.exitcode}")
    child.kill()
    child.join()
    for folder in _build.cache_folder().glob("checked-*"):
        shutil.rmtree(folder, ignore_errors=True)
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mutants", type=int, default=140)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=FILES, nargs="*", default=FILES, help="the record keeps the other files")
    options = parser.parse_args()
    os.environ["CUSCAN_CACHE_DIR"] = cache = tempfile.mkdtemp()
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {"files": {}}
    try:
        if (state := result_of(None))[0] != "survived":
            sys.exit(f"without a fault: {state}")
        for file, quota in quotas(options.mutants).items():
            if file in options.only:
                known = record["files"].get(file, {"survivors": []})
                record["files"][file] = run(file, quota, options.seed, known["survivors"])
                RECORD.write_text(json.dumps(summed(record["files"]), indent=1) + "\n")
    finally:
        shutil.rmtree(cache)


def run(file, quota, seed, known):
    """Try mutants of a file; what was said about a survivor stays."""
    said = {(each["before"], each["after"]): each["because"] for each in known}
    counts, killers, kinds, survivors = Counter(), Counter(), {}, []
    start = time.monotonic()
    for mutant in chosen(file, seed):
        if counts["killed"] + counts["survived"] >= quota:
            break
        result, detail = result_of(mutant)
        counts[result] += 1
        say(f"{time.monotonic() - start:5.0f} s  {result:16} {file}:{mutant.number} {mutant.kind} {detail}"[:160])
        if result == "does not compile":
            continue
        kinds.setdefault(mutant.kind, Counter())[result] += 1
        if result == "killed":
            killers[detail.partition(" by ")[0]] += 1
        else:
            say(f"    {mutant.before}\n    {mutant.after}")
            because = said.get((mutant.before, mutant.after), "")
            survivors.append({"kind": mutant.kind, "before": mutant.before, "after": mutant.after, "because": because})
    return {
        "digest": hashlib.sha256((_source.folder() / file).read_bytes()).hexdigest()[:16],
        "seed": seed,
        "mutants": counts["killed"] + counts["survived"],
        "killed": counts["killed"],
        "did not compile": counts["does not compile"],
        "killed by": dict(killers.most_common()),
        "kinds": {kind: dict(results) for kind, results in sorted(kinds.items())},
        "survivors": survivors,
    }


def summed(files):
    """The record. A survivor whose explanation begins with "equivalent" does not count in the score."""
    mutants, killed = (sum(each[name] for each in files.values()) for name in ("mutants", "killed"))
    because = [survivor["because"] for each in files.values() for survivor in each["survivors"]]
    equivalent = sum(text.startswith("equivalent") for text in because)
    score = round(killed / max(mutants - equivalent, 1), 3)
    return {"mutants": mutants, "killed": killed, "equivalent": equivalent, "score": score, "files": files}


def say(line):
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
