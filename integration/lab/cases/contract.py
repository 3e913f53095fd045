"""The contract of channels (tests/transport) on a real queue pair, in a guest of one host."""

import pathlib

from trial import Group, ONE_HOST

group = Group(ONE_HOST)


def contract(t, name):
    program = t.start(t.server, str(pathlib.Path(t.options.build_dir, "tests", name)), shim=False)
    status = t.finish(program, 240)
    t.expect(f"{name} ends with 0", status == 0, status)
    t.expect("its tests ran, and none was skipped", "PASSED" in program.out and "SKIPPED" not in program.out,
             program.out[-300:])
    t.note = (program.out.splitlines() or [""])[-1]


for name in ("transport_verbs_contract", "transport_verbs_contract_waiting", "transport_queue_pair_test",
             "transport_direct_wait_test"):
    group.add(name, lambda t, name=name: contract(t, name), beside=True)
