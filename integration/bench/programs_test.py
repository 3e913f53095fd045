"""The measuring programs measure: they print plausible figures, and they notice wrong bytes.

Needs BENCH_DIR (where the programs are). With BENCH_LIBRARY, the library, the test cases in Lifted run
too: the same programs under LD_PRELOAD, and the proof from the summary that streams were lifted.
"""

import json
import os
import socket
import subprocess
import sys
import threading
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "..", "scripts", "lib"))

import runner
import workloads

BENCH = os.environ.get("BENCH_DIR", "")
LIBRARY = os.environ.get("BENCH_LIBRARY", "")
SECONDS = 0.1
LONGEST = 3


def program(name):
    return os.path.join(BENCH, name)


def run(*argv):
    return subprocess.run([program(argv[0]), *argv[1:]], capture_output=True, text=True, timeout=60)


class Relay:
    """Stands between a client and a server and may spoil one byte on the way to the server."""

    def __init__(self, port, spoil):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.thread = threading.Thread(target=self._serve, args=(port, spoil), daemon=True)
        self.thread.start()

    def _serve(self, port, spoil):
        client, _ = self.listener.accept()
        server = socket.create_connection(("127.0.0.1", port))
        back = threading.Thread(target=self._copy, args=(server, client, None), daemon=True)
        back.start()
        self._copy(client, server, spoil)
        back.join()
        for each in (client, server, self.listener):
            each.close()

    @staticmethod
    def _copy(source, target, spoil):
        at = 0
        try:
            while data := source.recv(65536):
                data = bytearray(data)
                if spoil is not None and at <= spoil < at + len(data):
                    data[spoil - at] ^= 1
                at += len(data)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            pass


class Plain(unittest.TestCase):
    def measure(self, load, variant=None):
        with runner.Runner() as each:
            return load.run(each, variant or runner.Variant.plain())

    def test_round_trips_in_every_mode(self):
        for mode in ("block", "poll", "epoll"):
            for size in (1, 64, 65536):
                with self.subTest(mode=mode, size=size):
                    load = workloads.round_trip(BENCH, size, str(size), SECONDS, mode)
                    figures, _ = self.measure(load)
                    self.assertGreater(figures["p50_us"], 0.01)
                    self.assertGreaterEqual(figures["p99_us"], figures["p50_us"])

    def stream(self, size, mode, *extra):
        return workloads.OwnPair("stream", "stream", SECONDS, BENCH, "stream", ("messages_per_s",),
                                 ("--mode", mode), ("--size", str(size), "--mode", mode, *extra))

    def test_streams_in_every_mode_with_checksum(self):
        for mode in ("block", "poll", "epoll"):
            for size in (1, 64, 4097):
                with self.subTest(mode=mode, size=size):
                    figures, _ = self.measure(self.stream(size, mode, "--checksum", "1"))
                    self.assertGreater(figures["messages_per_s"], 0)

    def spoiled(self, name, at, *args):
        """The client's result when byte `at` of what it sends is changed on its way."""
        with runner.Runner() as each:
            port_file = os.path.join(each.folder, "port")
            server = each._start([program(name), "server", "--port-file", port_file],
                                 dict(os.environ), os.path.join(each.folder, "server"))
            relay = Relay(each._wait_for_port(server, None, port_file), at)
            return run(name, "client", "--port", str(relay.port), "--seconds", str(SECONDS), *args)

    def test_a_spoiled_byte_fails_a_checked_stream(self):
        done = self.spoiled("stream", 50_000, "--checksum", "1")
        self.assertEqual(done.returncode, 1)
        self.assertIn("other bytes", done.stderr)
        self.assertEqual(done.stdout, "")

    def test_the_relay_alone_fails_nothing(self):
        done = self.spoiled("stream", None, "--checksum", "1")
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_a_spoiled_byte_fails_a_round_trip(self):
        # Byte 16 + 64 * 10 is the first, changing byte of the eleventh message.
        done = self.spoiled("rtt", 16 + 640)
        self.assertEqual(done.returncode, 1)
        self.assertIn("not what was sent", done.stderr)

    def test_short_connections(self):
        for mode in ("thread", "epoll"):
            for clients in (1, 8):
                with self.subTest(mode=mode, clients=clients):
                    load = workloads.connect_rate(BENCH, clients, SECONDS)
                    load.server_args += ["--mode", mode]
                    load.client_args += ["--connections", "500"]
                    figures, _ = self.measure(load)
                    self.assertGreater(figures["connections_per_s"], 10)

    def test_bare_ring(self):
        for test, figure in (("copy", "bytes_per_s"), ("spin", "p50_us"), ("futex", "p50_us")):
            for ring in ("64K", "1M"):
                with self.subTest(test=test, ring=ring):
                    done = run("bare_ring", test, "--ring", ring, "--seconds", str(SECONDS))
                    self.assertEqual(done.returncode, 0, done.stderr)
                    self.assertGreater(json.loads(done.stdout)[figure], 0)

    @unittest.skipIf(os.environ.get("BENCH_SANITIZER"), "a sanitizer takes over read and write")
    def test_cost_of_a_call_without_a_library_is_nothing(self):
        done = run("syscall_cost", "--batches", "500")
        self.assertEqual(done.returncode, 0, done.stderr)
        report = json.loads(done.stdout)
        self.assertIs(report["taken_over"], False)
        # A broken method is wrong by far more than this; a busy machine is not.
        self.assertLess(abs(report["added_ns"]), report["ns_per_call_median"] / 4)

    def test_cost_of_a_start(self):
        done = run("startup_cost", "--runs", "5")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertGreater(json.loads(done.stdout)["plain_us_median"], 10)

    def test_bad_arguments_have_a_status_of_their_own(self):
        for argv in (["rtt"], ["rtt", "client"], ["stream", "client", "--port", "1", "--size", "x"],
                     ["rtt", "server", "--mode", "magic"], ["connect_rate", "server", "--frog", "1"],
                     ["bare_ring", "copy", "--ring", "1000"], ["syscall_cost", "--batches"]):
            with self.subTest(argv=argv):
                self.assertEqual(run(*argv).returncode, 2)

    def test_a_refused_connection_is_an_error(self):
        port = runner.free_port("127.0.0.1")
        done = run("rtt", "client", "--port", str(port))
        self.assertEqual(done.returncode, 1)
        self.assertIn("connect", done.stderr)


@unittest.skipUnless(LIBRARY, "BENCH_LIBRARY is not set")
class Lifted(Plain):
    """The cases that make streams, under the library; each must prove that it was lifted."""

    def measure(self, load, variant=None):
        shm = runner.Variant.shim(LIBRARY, "shm")
        if load.key.startswith("connect"):
            shm.lifts_to = None  # too short to lift
        figures, proof = super().measure(load, shm)
        # The proof wants nearly all bytes on the path. A busy machine lifts later: until the beginning on TCP weighs
        # less than that, the run has to be longer. A stream that is never lifted stays one.
        while proof and not proof.ok and load.seconds < LONGEST:
            load.seconds *= 6
            figures, proof = super().measure(load, shm)
        if proof:
            self.assertTrue(proof.ok, proof.text())
        return figures, proof


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[1:]])
