"""Sweeps the operator suite in processes that may die: one JSON line per case.

python -m tests.suites.op_sweep [-n SAMPLES] [-j PROCESSES] [-f function,inplace] [-o FILE] [ENTRY ...]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.suites.op_cases import FORMS, entries, forms_of

LONGEST_S = 120.0
"""How long one entry may take before its process counts as dead."""


def work() -> None:
    """Read tasks line by line, answer each with its cases' outcomes; what dies is noticed by who asked."""
    import torch

    from tests.suites.op_cases import cases
    from tests.suites.op_check import outcome

    torch.set_num_threads(1)
    answers = sys.stdout
    sys.stdout = sys.stderr
    for line in sys.stdin:
        task = json.loads(line)
        for case in cases(task["entry"], task["form"], task["samples"]):
            print(json.dumps({"begun": str(case)}), file=answers, flush=True)
            print(json.dumps(outcome(case, task["seeds"], task["compile"])), file=answers, flush=True)
        print(json.dumps({"done": True}), file=answers, flush=True)


class Worker:
    """A process that does tasks, and is started again if it dies."""

    def __init__(self) -> None:
        self.process: Any = None

    def run(self, task: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Outcomes of a task's cases."""
        if self.process is None:
            command = [sys.executable, "-m", "tests.suites.op_sweep", "--work"]
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
        begun = f"{task['entry']}/{task['form']}"
        try:
            self.process.stdin.write(json.dumps(task) + "\n")
            self.process.stdin.flush()
            while line := self.process.stdout.readline():
                answer = json.loads(line)
                if "done" in answer:
                    return
                if "begun" in answer:
                    begun = answer["begun"]
                else:
                    yield answer
        except BrokenPipeError:
            pass
        code = self.process.wait()
        self.process = None
        yield {"case": begun, "entry": task["entry"], "form": task["form"], "status": "crash", "stage": "",
               "why": f"exit code {code}", "seconds": 0.0}  # fmt: skip

    def close(self) -> None:
        """Let the process go."""
        if self.process is not None:
            self.process.stdin.close()
            self.process.wait(20)
            self.process = None


def sweep(tasks: list[dict[str, Any]], processes: int) -> Iterator[dict[str, Any]]:
    """Outcomes of all tasks, as they come."""
    shares = [tasks[k::processes] for k in range(processes)]

    def one(share: list[dict[str, Any]]) -> list[dict[str, Any]]:
        worker = Worker()
        found = [answer for task in share for answer in worker.run(task)]
        worker.close()
        return found

    if processes == 1:
        worker = Worker()
        for task in tasks:
            yield from worker.run(task)
        worker.close()
        return
    with ThreadPoolExecutor(processes) as pool:
        for found in pool.map(one, shares):
            yield from found


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", action="store_true")
    parser.add_argument("-n", "--samples", type=int, default=2)
    parser.add_argument("-j", "--processes", type=int, default=1)
    parser.add_argument("-f", "--forms", default=",".join(FORMS))
    parser.add_argument("-s", "--seeds", type=int, default=3)
    parser.add_argument("-c", "--compile", action="store_true")
    parser.add_argument("-o", "--output")
    parser.add_argument("entries", nargs="*")
    asked = parser.parse_args()
    if asked.work:
        work()
        return
    known = entries()
    names = [n for n in known if not asked.entries or n in asked.entries]
    tasks = [
        {"entry": n, "form": f, "samples": asked.samples, "seeds": asked.seeds, "compile": asked.compile}
        for n in names
        for f in forms_of(known[n])
        if f in asked.forms.split(",")
    ]
    counts: Counter[str] = Counter()
    out = open(asked.output, "w") if asked.output else sys.stdout  # noqa: SIM115
    for answer in sweep(tasks, asked.processes):
        counts[answer["status"]] += 1
        print(json.dumps(answer), file=out, flush=True)
    print(dict(counts), file=sys.stderr)


if __name__ == "__main__":
    main()
