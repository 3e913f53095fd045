"""The one-symptom programs of integration/semantics on a queue pair: what they print must be what they print over TCP.

Both roles of a program share a control channel, so they run in one guest, at the address of its device. The judge is plain
Linux: what the build's host has judged already counts (ctest runs that first), because whatever equals it is right; where
the two differ, plain TCP is heard in the guest.
"""

import pathlib
import sys

import trial

group = trial.Group(trial.ONE_HOST)
SEMANTICS = trial.INTEGRATION / "semantics"
LIMITS = SEMANTICS / "limits.json"
SLOWER_MS = 3000  # rxe against TCP, where megabytes are waited for; a lost wake-up costs 5 s at least
SECONDS = 60  # seconds for one run of a variant


# Programs that are not equal on a queue pair yet, or can't be, each with its reason; the run names them. Remove the line
# with the fix. (Differences of single variants that have to be are in limits.json.)
NOT_YET = {
    "huge_calls": "2 GiB take an emulated guest five minutes",
    "pending_bytes": "client_fills: SIOCOUTQ does not count what the peer has not read (DESIGN.md, Open)",
    "user_timeout": "TCP_USER_TIMEOUT does not time what is on a queue pair (DESIGN.md, Known limits)",
}


def compare(t, name):
    if t.rdma and name in NOT_YET:
        raise trial.Unsupported("not equal yet: " + NOT_YET[name])
    built = pathlib.Path(t.options.build_dir, "integration/semantics")
    env = {"PAIR_HOST": t.server.address, "PAIR_HOST6": t.server.address6 or "::1", "RSOCK_LOG": t.options.log}
    mode = "rdma" if t.rdma else "tcp"
    program = t.start(
        t.server, f"{sys.executable} -I -S -B {SEMANTICS / 'compare_modes'} --modes {mode} --lib {t.options.library} "
        f"--timeout {SECONDS} {f'--judged {built}/judged --any-kernel --slower {SLOWER_MS} --limits {LIMITS}' if t.rdma else ''} "
        f"{built / name}", shim=False, env=env)
    status = t.finish(program, 600)
    rows = program.out.splitlines()
    t.expect(f"{name} is as over TCP", status == 0, program.out[-30000:] + program.err[-1000:])
    same = sum("| same" in row or "| limit" in row for row in rows)
    t.note = f" {same} variants" + "".join(f"; {row.split()[0]}: a known limit" for row in rows if "| limit" in row)


for source in sorted(SEMANTICS.glob("*.c")):
    group.add(source.stem, lambda t, name=source.stem: compare(t, name), beside=True)
