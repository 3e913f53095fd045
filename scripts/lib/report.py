"""Collects rounds, takes medians, and prints tables and a progress line."""

import os
import platform
import resource
import statistics
import sys
import time

import runner
import summary


class Series:
    """Every round of one workload in one variant."""

    # A workload that failed this often in a variant will not get better.
    MAX_FAILURES = 2

    def __init__(self, variant):
        self.variant = variant
        self.rounds = []
        self.errors = []
        self.proof = summary.Proof(variant.lifts_to) if variant.lifts_to else None

    def measure(self, run, workload):
        # Another's program that fails from the first is not waited for again.
        if len(self.errors) >= (self.MAX_FAILURES if self.rounds or not self.variant.other else 1):
            return None
        try:
            figures, proof = workload.run(run, self.variant)
        except runner.RunError as error:
            self.errors.append(str(error))
            return None
        self.rounds.append(figures)
        if proof:
            self.proof.add(proof)
        return figures

    def median(self, name):
        values = [figures[name] for figures in self.rounds if name in figures]
        return statistics.median(values) if values else None

    @property
    def good(self):
        """Measured every time, and lifted every time if it should be."""
        return bool(self.rounds) and not self.errors and (self.proof is None or self.proof.ok)

    def as_json(self):
        result = {"rounds": self.rounds, "errors": self.errors, "good": self.good}
        if self.rounds:
            result["median"] = {name: self.median(name) for name in self.rounds[0]}
        if self.proof:
            result["proof"] = self.proof.as_json()
        return result


class Progress:
    """One line that is rewritten on a terminal; one line a step elsewhere. On stderr, always."""

    def __init__(self, name, total):
        self.name = name
        self.total = total
        self.done = 0
        self.start = time.monotonic()
        self.live = sys.stderr.isatty()

    def step(self, text):
        self.done += 1
        elapsed = time.monotonic() - self.start
        left = ""
        if self.done > 2:
            left = f", about {elapsed / (self.done - 1) * (self.total - self.done + 1):.0f} s left"
        self._write(f"{self.name}: [{self.done}/{self.total}] {text}{left}")

    def end(self):
        if self.live:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def _write(self, line):
        sys.stderr.write(f"\r\x1b[K{line}" if self.live else line + "\n")
        sys.stderr.flush()


def number(value):
    """Three or four significant digits, with thousands kept together."""
    if value is None:
        return "-"
    if value >= 10000:
        return f"{value:,.0f}"
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 0.1 else f"{value:.3f}"


def rounds(count):
    return "1 round" if count == 1 else f"{count} rounds"


def times(value):
    if value is None:
        return "-"
    return f"{value:.1f}x" if value >= 10 else f"{value:.2f}x"


def table(rows, right=()):
    """Rows of cells, as wide as they need; a row that is a string spans the table."""
    cells = [row for row in rows if not isinstance(row, str)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    lines = []
    for row in rows:
        if isinstance(row, str):
            lines.append(row)
            continue
        parts = [cell.rjust(w) if i in right else cell.ljust(w)
                 for i, (cell, w) in enumerate(zip(row, widths))]
        lines.append("  ".join(parts).rstrip())
    return "\n".join(lines)


class Neighbours:
    """How much of the machine others used while we measured: their work is in our figures."""

    # Of one core, on average: below this nobody would notice.
    NOTABLE = 0.15

    def __init__(self):
        self._start = time.monotonic()
        self._busy_then = self._busy()
        self._ours_then = self._ours()

    @staticmethod
    def _busy():
        """Seconds that any core was busy, or was taken from this machine by its host (steal)."""
        try:
            with open("/proc/stat") as lines:
                ticks = [int(field) for field in next(lines).split()[1:9]]
        except (OSError, ValueError, StopIteration):
            return 0.0
        user, nice, system, _idle, _iowait, irq, softirq, steal = ticks
        return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")

    @staticmethod
    def _ours():
        total = 0.0
        for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
            usage = resource.getrusage(who)
            total += usage.ru_utime + usage.ru_stime
        return total

    def cores(self):
        elapsed = max(time.monotonic() - self._start, 1e-9)
        others = (self._busy() - self._busy_then) - (self._ours() - self._ours_then)
        return max(0.0, others / elapsed)

    def text(self):
        used = self.cores()
        if used < self.NOTABLE:
            return None
        return (f"note: others used {used:.1f} of {os.cpu_count()} cores meanwhile. Whatever spins "
                "or needs both cores measured worse than it is; repeat on a quiet machine.")


def machine():
    """What a reader needs to know to compare two reports. No host name: it is nobody's business."""
    cpu, cores = "unknown CPU", 0
    try:
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                if line.startswith("processor"):
                    cores += 1
                elif line.startswith("model name"):
                    cpu = line.split(":", 1)[1].strip()
    except OSError:
        pass
    return {"cpu": cpu, "cores": cores, "kernel": platform.release(), "arch": platform.machine()}
