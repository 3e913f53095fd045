"""The Runner of measurements whose programs run on a lab's hosts: the server on the first, the client on the last.

It has what workloads use of runner.Runner (address, free_port, pair), and what only an RDMA device makes worth
asking: `observe`, which looks at both processes while they are busy.
"""

import itertools
import os
import shlex
import time

import runner
import verbs
from lab import HostDown, LabTimeout

# Emulated guests on a shared machine are slow to start programs; a run that hangs is found soon enough.
GRACE = 90
OTHERS_GRACE = 15  # librspreload fails on iperf3 (verbs.Rstream says why), which then waits for ever
FIRST_PORT = 20000  # below the kernel's own choices
FEWEST_PACKETS = 150  # of any run that uses the device: connecting and parting take some ten


class LabRunner:
    def __init__(self, lab):
        self.server_host, self.client_host = lab.hosts[0], lab.hosts[-1]
        self.address = self.server_host.address
        self.device = verbs.Device(self.server_host)
        self._here = lab.here
        self._ports = itertools.count(FIRST_PORT)
        self._count = 0
        self._live = []

    def free_port(self):
        return runner.free_port(self.address) if self._here else next(self._ports)

    def pair(self, variant, server, client, seconds, observe=None):
        """As Runner.pair. observe([(host, process) of server, of client]): called when both run; what it returns is
        `observed`.

        A server or client command may be a text, which is a shell's.
        """
        self._count += 1
        paths = {role: os.path.join(host.results, f"{self._count}.{role}")
                 for role, host in (("server", self.server_host), ("client", self.client_host))}
        limit = time.monotonic() + seconds + (OTHERS_GRACE if variant.other else GRACE)
        port_file = paths["server"] + ".port"
        argv, port = server(port_file)
        sent = self.device.packets() if variant.other else None
        try:
            serving = self._start(self.server_host, argv, variant, paths["server"])
            port = self._wait_for_port(serving, port, port_file, limit)
            calling = self._start(self.client_host, client(port), variant, paths["client"])
            observed = observe([(self.server_host, serving), (self.client_host, calling)]) if observe else None
            outs = [self._finish(process, limit, role)
                    for process, role in ((calling, "client"), (serving, "server"))]
        except HostDown as fault:
            raise runner.RunError(str(fault)) from None
        except LabTimeout as fault:  # a look at them, or the shell that was to start them
            raise runner.RunError(runner.tail(str(fault))) from None
        finally:
            self._stop_all()
        if sent is not None and self.device.packets() - sent < FEWEST_PACKETS:
            raise runner.RunError("it ran, but over TCP: next to nothing went through the RDMA device")
        summaries = {role: runner.read(path + ".summary") for role, path in paths.items()}
        return runner.Result(*outs, {"server": serving.pid, "client": calling.pid}, summaries, observed)

    def _start(self, host, argv, variant, base):
        env = {name: value for name, value in runner.environment(variant, base + ".summary").items()
               if name in variant.env or name.startswith("RSOCK_")}
        # exec: the pid is the program's. By env(1): the shell itself is not preloaded.
        words = ["exec", "env", *(f"{name}={value}" for name, value in env.items())]
        words += ["bash", "-c", argv] if isinstance(argv, str) else argv
        process = host.start("ulimit -n 16384; " + shlex.join(words))
        process.title = argv if isinstance(argv, str) else " ".join([os.path.basename(argv[0])] + argv[1:])
        self._live.append(process)
        return process

    def _wait_for_port(self, process, port, port_file, limit):
        while process.rc is None and time.monotonic() < limit:
            if port is None:
                if text := runner.read(port_file):
                    return int(text)
                time.sleep(0.02)
            # A listener of librspreload is no TCP socket.
            elif self.server_host.run(f"for i in 1 2 3 4 5 6 7 8; do grep -qs ':{port:04X} 0*:0000 0A' /proc/net/tcp "
                                      f"/proc/net/tcp6 || rdma resource show cm_id | grep -q 'LISTEN .*:{port} ' && exit; "
                                      "sleep 0.05; done; exit 1", GRACE).rc == 0:
                return port
        said = (process.errors() or process.output())[-300:]
        how = "does not listen" if process.rc is None else f"ended at once with status {process.rc}"
        raise runner.RunError(f"the server {how} ({process.title}): {' '.join(said.split())}")

    @staticmethod
    def _finish(process, limit, role):
        try:
            status = process.wait(max(0.1, limit - time.monotonic()))
        except LabTimeout:
            raise runner.RunError(f"the {role} did not end in time ({process.title})") from None
        if status:
            raise runner.RunError(f"the {role} ended with status {status} ({process.title}): "
                                  + runner.tail(process.errors() or process.output()))
        return process.output()

    def _stop_all(self):
        for process in self._live:
            for number in (15, 9):
                if process.rc is not None:
                    break
                try:
                    process.kill(number)
                    process.wait(3)
                except (LabTimeout, HostDown):
                    pass
        self._live = []
