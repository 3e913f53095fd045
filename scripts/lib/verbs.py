"""What an RDMA device does for programs that speak verbs: the limit that stands beside our figures.

ibv_rc_pingpong (rdma-core) takes its times from the wall clock. perftest's ib_write_bw reads the cycle counter, which
tells nothing in an emulated machine: its bandwidth is taken from the moments at which it prints its lines.
"""

import ipaddress
import re

import runner
import workloads

LOWEST, HIGHEST = 200, 10_000_000  # messages of a run
STAMPED = 'while IFS= read -r line; do echo "$EPOCHREALTIME $line"; done'


class Device:
    """An RDMA device of a host, and where the host's address stands in its tables."""

    def __init__(self, host):
        self._host = host
        self.name = host.rdma_device
        self._folder = f"/sys/class/infiniband/{self.name}/ports"
        self.port, self.gid = self._place(host.address)
        self.mtu = self._mtu()

    def _place(self, address):
        """(port, index of the GID that is the address, of RoCE v2 where there are two; None on InfiniBand)."""
        wanted = ipaddress.IPv6Address(f"::ffff:{address}").exploded
        found = self._host.run(f"cd {self._folder} && grep -sF {wanted} */gids/*; grep -sH v2 */gid_attrs/types/*").out
        places = re.findall(rf"^(\d+)/gids/(\d+):{wanted}", found, re.M)
        second = [place for place in places if re.search(rf"^{place[0]}/gid_attrs/types/{place[1]}:", found, re.M)]
        return (second or places or [("1", None)])[0]

    def _mtu(self):
        found = re.search(r"active_mtu:\s+(\d+)", self._host.run(f"ibv_devinfo -d {self.name} -i {self.port}").out)
        return found[1] if found else "1024"

    def packets(self):
        """Sent so far; None where the driver does not count."""
        text = self._host.run(f"cd {self._folder}/{self.port} && cat hw_counters/sent_pkts || "
                              "cat counters/port_xmit_packets").out.strip()
        return int(text) if text.isdigit() else None


class Raw(workloads.Workload):
    """A pair of verbs programs that run for a number of messages, chosen so that it takes about `seconds`."""

    def __init__(self, key, title, seconds, size, messages):
        super().__init__(key, title, seconds)
        self.size = size
        self.messages = messages
        self._tuned = False

    def run(self, run, variant):
        seconds, figures = self._once(run, variant)
        if not self._tuned and seconds > 0:
            # The first run only tells how long a message takes.
            self._tuned = True
            self.messages = min(HIGHEST, max(LOWEST, int(self.messages * self.seconds / seconds)))
            seconds, figures = self._once(run, variant)
        return figures, None


class PingPong(Raw):
    """ibv_rc_pingpong, polling: the time of a message there and back."""

    def __init__(self, size, label, seconds):
        super().__init__(f"pingpong_{size}", f"ibv_rc_pingpong {label}", seconds, size, 500)

    def _once(self, run, variant):
        device, port = run.device, run.free_port()
        argv = ["ibv_rc_pingpong", "-d", device.name, "-i", device.port, "-m", device.mtu, "-s", str(self.size),
                "-n", str(self.messages), "-p", str(port)]
        argv += [] if device.gid is None else ["-g", device.gid]
        result = run.pair(variant, lambda _: (argv, port), lambda _: argv + [run.address], self.seconds * 4)
        found = re.search(r"iters in ([\d.]+) seconds = ([\d.]+) usec/iter", result.client_out)
        if not found:
            raise runner.RunError("ibv_rc_pingpong told no time: " + runner.tail(result.client_out))
        return float(found[1]), {"mean_us": float(found[2])}


class WriteBandwidth(Raw):
    """ib_write_bw: one queue pair, many writes of one size under way."""

    def __init__(self, size, label, seconds):
        super().__init__(f"write_bw_{size}", f"ib_write_bw {label}", seconds, size, LOWEST)

    def _once(self, run, variant):
        device, port = run.device, run.free_port()
        server = ["ib_write_bw", "-d", device.name, "-i", device.port, "-F", "-s", str(self.size),
                  "-n", str(self.messages), "-p", str(port)]
        server += [] if device.gid is None else ["-x", device.gid]
        client = f"set -o pipefail; stdbuf -oL {' '.join(server)} {run.address} | {STAMPED}"
        result = run.pair(variant, lambda _: (server, port), lambda _: client, self.seconds * 4)
        seconds = elapsed(result.client_out, self.size, self.messages)
        return seconds, {"gbit_per_s": self.messages * self.size * 8 / seconds / 1e9}


class Rstream(Raw):
    """rstream (rdma-core): what rsockets do in a program that was written for them, by the wall clock.

    Preloaded as librspreload they fail on iperf3: after the first block it asks for TCP_INFO, which getsockopt of rsockets
    does not have.
    """

    def __init__(self, size, label, seconds):
        super().__init__(f"rstream_{size}", f"rstream {label}", seconds, size, LOWEST)

    def _once(self, run, variant):
        port = run.free_port()
        argv = ["rstream", "-p", str(port), "-S", str(self.size), "-C", str(self.messages), "-I", "1"]
        result = run.pair(variant, lambda _: (argv + ["-b", run.address], port), lambda _: argv + ["-s", run.address],
                          self.seconds * 4)
        found = re.search(r"\s([\d.]+)s\s+[\d.]+\s+[\d.]+\s*$", result.client_out)
        if not found or float(found[1]) <= 0:
            raise runner.RunError("rstream told no time: " + runner.tail(result.client_out))
        seconds = float(found[1])
        # All messages there, then all of them back.
        return seconds, {"gbit_per_s": 2 * self.messages * self.size * 8 / seconds / 1e9}


def elapsed(text, size, messages):
    """Seconds between the table's head, printed before the first write, and its row, printed after the last."""
    head = re.search(r"^([\d.]+)\s+#bytes", text, re.M)
    row = re.search(rf"^([\d.]+)\s+{size}\s+{messages}\s", text, re.M)
    if not head or not row or float(row[1]) <= float(head[1]):
        raise runner.RunError("ib_write_bw told no time: " + runner.tail(text))
    return float(row[1]) - float(head[1])
