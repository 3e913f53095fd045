"""Tests of the measuring scripts: what counts as lifted, what a gain is, and that nothing is left."""

import collections
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import bench
import compare
import figures
import figures_rdma
import observe
import plot
import report
import runner
import servers
import service_programs
import summary
import verbs
import workloads


def line(pid, shm=1, sent=None, **more):
    entry = {"pid": pid, "exe": "x", "streams": 2, "lifted": {"shm": shm, "rdma": 0}, "set_down": 0,
             "bytes_sent": sent or {"tcp": 10, "shm": 9990, "rdma": 0},
             "bytes_received": {"tcp": 0, "shm": 0, "rdma": 0}, "zero_copy_bytes": 0,
             "not_lifted": {}}
    entry.update(more)
    return json.dumps(entry) + "\n"


PIDS = {"server": 1, "client": 2}


class SummaryTest(unittest.TestCase):
    def test_both_sides_on_the_path_is_lifted(self):
        proof = summary.prove(line(1) + line(2), PIDS, "shm")
        self.assertTrue(proof.ok)
        self.assertEqual(proof.text(), "lifted: shm 2/4 streams, 99.9% of bytes")

    def test_one_side_alone_is_not(self):
        proof = summary.prove(line(1) + line(2, shm=0, not_lifted={"peer_silent": 3},
                                              refused={"version": 2}), PIDS, "shm")
        self.assertFalse(proof.ok)
        self.assertIn("NOT LIFTED", proof.text())
        self.assertIn("peer_silent 3", proof.text())
        self.assertIn("refused: version 2", proof.text())
        self.assertIn("the client", proof.text())

    def test_a_silent_process_is_not(self):
        proof = summary.prove(line(1), PIDS, "shm")
        self.assertFalse(proof.ok)
        self.assertIn("no summary from the client", proof.text())

    def test_another_process_s_line_does_not_count(self):
        self.assertFalse(summary.prove(line(1) + line(3), PIDS, "shm").ok)

    def test_another_path_does_not_count(self):
        self.assertFalse(summary.prove(line(1) + line(2), PIDS, "rdma").ok)

    def test_a_lifted_stream_whose_bytes_went_elsewhere_is_not(self):
        slow = {"tcp": 5000, "shm": 5000}
        proof = summary.prove(line(1, sent=slow) + line(2, sent=slow), PIDS, "shm")
        self.assertIn("only 50.0% of bytes", proof.text())

    def test_broken_lines_are_no_proof_and_no_crash(self):
        for text in ("", "{", "[]\n", "null\n", '{"pid": "1"}\n', '{"pid": true}\n',
                     line(1, lifted=3) + line(2, bytes_sent=[1]),
                     line(1, lifted={"shm": -1}) + line(2, lifted={"shm": "1"})):
            with self.subTest(text=text):
                self.assertFalse(summary.prove(text, PIDS, "shm").ok)

    def test_one_bad_round_spoils_the_sum(self):
        total = summary.Proof("shm")
        total.add(summary.prove(line(1) + line(2), PIDS, "shm"))
        self.assertTrue(total.ok)
        total.add(summary.prove("", PIDS, "shm"))
        self.assertFalse(total.ok)

    def test_two_hosts_may_give_the_same_pid(self):
        both = {"server": line(7, shm=0), "client": line(7)}
        proof = summary.prove(both, {"server": 7, "client": 7}, "shm")
        self.assertEqual(proof.faults, ["no stream of the server went onto shm"])
        both["server"] = line(7)
        self.assertTrue(summary.prove(both, {"server": 7, "client": 7}, "shm").ok)
        self.assertFalse(summary.prove({"client": line(7)}, {"server": 7, "client": 7}, "shm").ok)

    def test_what_was_measured_must_have_arrived_on_the_path(self):
        took = {"tcp": 9000, "shm": 1000}
        both = line(1, bytes_received=took) + line(2)
        self.assertTrue(summary.prove(both, PIDS, "shm", measured=1100).ok)
        late = summary.prove(both, PIDS, "shm", measured=2000)
        self.assertIn("of 2000 bytes that were measured, 1000 went over shm", late.text())

    def test_no_run_is_no_proof(self):
        self.assertFalse(summary.Proof("shm").ok)


class ReportTest(unittest.TestCase):
    def test_a_gain_above_one_is_better_whatever_the_figure(self):
        self.assertEqual(workloads.gain("gbit_per_s", 10, 40), 4)
        self.assertEqual(workloads.gain("p50_us", 40, 10), 4)
        self.assertIsNone(workloads.gain("p50_us", 40, None))

    def test_medians_and_failures(self):
        class Load:
            def __init__(self):
                self.calls = 0

            def run(self, run, variant):
                self.calls += 1
                if self.calls > 3:
                    raise runner.RunError("no more")
                return {"p50_us": [1, 100, 3][self.calls - 1]}, None

        load, series = Load(), report.Series(runner.Variant.plain())
        for _ in range(10):
            series.measure(None, load)
        self.assertEqual(series.median("p50_us"), 3)
        self.assertFalse(series.good)
        self.assertEqual(load.calls, 5)  # three that worked, two failures, then no more attempts

    def test_table_columns_line_up(self):
        text = report.table([["", "a"], ["row", "1"], "a line of its own", ["r", "100"]], right=(1,))
        self.assertEqual(text, "       a\nrow    1\na line of its own\nr    100")

    def test_iperf3_figures(self):
        text = json.dumps({"end": {
            "sum_received": {"bytes": 2e9, "seconds": 2.0, "bits_per_second": 8e9},
            "cpu_utilization_percent": {"host_total": 60.0, "remote_total": 40.0}}})
        result = runner.Result(text, "", PIDS, "")
        self.assertEqual(workloads.Iperf3("128K", 2)._figures(result),
                         {"gbit_per_s": 8.0, "cpu_s_per_gb": 1.0})
        for bad in ("", "{}", '{"error": "unable to connect"}'):
            with self.assertRaises(runner.RunError):
                workloads.Iperf3("128K", 2)._figures(runner.Result(bad, "", PIDS, ""))


    def test_iperf3_gets_its_flags_and_a_file(self):
        class Run:
            address = "127.0.0.1"

            def free_port(self):
                return 7

            def file(self, size):
                return f"/files/{size}"

            def pair(self, variant, server, client, seconds):
                self.server, self.client = server(None)[0], client(7)

        load, run = workloads.Iperf3("128K", 3, flags=("-Z", "-F")), Run()
        self.assertEqual((load.key, load.title), ("iperf3_128K_Z_F", "iperf3 -l 128K -Z -F"))
        load._run(run, runner.Variant.plain())
        self.assertEqual(run.client[-3:], ["-Z", "-F", f"/files/{workloads.FILE_BYTES}"])
        self.assertNotIn("-Z", run.server)

    def test_cpu_time_of_a_file_is_counted_from_outside(self):
        text = json.dumps({"end": {
            "sum_received": {"bytes": 1e9, "seconds": 0.1, "bits_per_second": 8e10},
            "cpu_utilization_percent": {"host_total": 60.0, "remote_total": 40.0}}})
        result = runner.Result(text, "", PIDS, "", cpu_seconds=0.25)
        self.assertEqual(workloads.Iperf3("128K", 2, flags=("-F",))._figures(result)["cpu_s_per_gb"], 0.25)
        self.assertEqual(workloads.Iperf3("128K", 2, flags=("-Z",))._figures(result)["cpu_s_per_gb"], 0.1)

    def test_files_are_sent_where_there_is_time_to_lift_and_a_disk(self):
        for paths, lab, expected in (("tcp,shm", False, {"iperf3_128K_Z", "iperf3_128K_F", "download_256m"}),
                                     ("tcp,shm,rdma", True, {"iperf3_128K_Z"})):
            options = compare.parse_arguments(["--paths", paths, "--build-dir", "/nowhere"])
            keys = [load.key for load in compare.Plan(options, lab).loads]
            self.assertEqual({key for key in keys if key[-2:] in ("_Z", "_F") or "download" in key}, expected)
            self.assertEqual(len(keys), len(set(keys)))


class DownloadTest(unittest.TestCase):
    def test_the_rate_is_of_all_bytes_in_all_of_their_time(self):
        load = workloads.Download(2, 1000)
        self.assertEqual(load._rates(["1000 0.5", "1000 1.5"], 2e-6), {"gbit_per_s": 8e-6, "cpu_s_per_gb": 1.0})
        for bad in (["1000 0.5", "999 0.5"], ["1000 0.5"], ["1000 0.5", ""], ["1000 0", "1000 0"], ["", ""], ["x y", "1 1"]):
            with self.subTest(bad=bad), self.assertRaises(runner.RunError):
                load._rates(bad, 1)

    def proof(self, text):
        return workloads.Download._proof(text, 1, {"curl 1": 3, "curl 2": 4}, runner.Variant.shim("/lib", "shm"))

    def test_the_worker_and_every_curl_must_be_lifted(self):
        master = line(1, shm=0, streams=0, sent={"tcp": 0})
        self.assertTrue(self.proof(master + line(2) + line(3) + line(4)).ok)
        self.assertIn("the nginx went", self.proof(master + line(2, shm=0) + line(3) + line(4)).text())
        self.assertIn("the nginx went", self.proof(master + line(3) + line(4)).text())
        self.assertIn("the curl 2 went", self.proof(master + line(2) + line(3) + line(4, shm=0)).text())
        self.assertIn("no summary from the curl 1", self.proof(master + line(2) + line(4)).text())

    def test_nginx_and_curl_give_figures(self):
        if not shutil.which(service_programs.NGINX) or not shutil.which("curl"):
            self.skipTest("nginx or curl is not installed")
        addresses = ["127.0.0.1"]
        with contextlib.suppress(OSError):  # no IPv6 here
            runner.free_port("::1")
            addresses.append("::1")
        for address in addresses:
            with self.subTest(address=address), runner.Runner(address) as run:
                figures, proof = workloads.Download(2, 1 << 20).run(run, runner.Variant.plain())
                self.assertGreater(figures["gbit_per_s"], 0)
                self.assertGreater(figures["cpu_s_per_gb"], 0)
                self.assertIsNone(proof)
                self.assertEqual(run._live, [])


class NeighboursTest(unittest.TestCase):
    def test_our_own_work_is_not_a_neighbour_s(self):
        neighbours = report.Neighbours()
        before = neighbours._busy()
        subprocess.run([sys.executable, "-c", "for _ in range(3000000): pass"], check=True)
        ours, all_busy = neighbours._ours() - neighbours._ours_then, neighbours._busy() - before
        self.assertGreater(ours, 0.05)
        self.assertGreater(all_busy, 0.05)
        self.assertLess(neighbours.cores(), os.cpu_count() + 0.5)

    def test_another_process_s_work_is(self):
        busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        try:
            neighbours = report.Neighbours()
            time.sleep(1)
            # It is our child, but it has not ended: not counted as ours yet.
            self.assertGreater(neighbours.cores(), 0.2)
        finally:
            busy.kill()
            busy.wait()


class ServersTest(unittest.TestCase):
    def test_less_than_a_tick_of_cpu_time_counts(self):
        before, began = servers.cpu_seconds(os.getpid()), time.process_time()
        while time.process_time() < began + 0.002:
            pass
        self.assertGreaterEqual(servers.cpu_seconds(os.getpid()), before + 0.002)

    def test_cpu_time_of_a_child_counts_while_it_lives(self):
        code = ("import sys, time\nwhile time.process_time() < 0.1: pass\n"
                "print('done', flush=True)\nsys.stdin.read()")
        before = servers.cpu_seconds(os.getpid())
        with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
            child.stdout.readline()
            self.assertGreaterEqual(servers.cpu_seconds(os.getpid()), before + 0.1)
            child.stdin.close()
        self.assertEqual(servers.cpu_seconds(child.pid), 0)


class FigureTest(unittest.TestCase):
    def verdict(self, values, target=4, unit="x", text=None):
        plain, shm = runner.Variant.plain("plain"), runner.Variant.shim("/x", "shm")
        load = workloads.Iperf3("128K", 1)
        figure = figures.Figure("k", "t", target, unit, [(load, plain), (load, shm)],
                                figures.ratio("gbit_per_s"))
        results = {}
        for variant, series in zip((plain, shm), values):
            one = report.Series(variant)
            one.rounds = [{"gbit_per_s": value} for value in series]
            results[load.key, variant.name] = one
        results[load.key, "shm"].proof.add(
            summary.prove(line(1) + line(2) if text is None else text, PIDS, "shm"))
        return bench.Verdict(figure, results)

    def test_met_and_not_met(self):
        self.assertIs(self.verdict([[10, 11, 12], [50, 44, 43]]).met, True)
        self.assertIs(self.verdict([[10, 11, 12], [40, 43, 43]]).met, False)

    def test_a_figure_that_was_not_lifted_is_not_met(self):
        verdict = self.verdict([[10], [90]], text="")
        self.assertIsNot(verdict.met, True)
        self.assertIn("NO", verdict.cells()[-1])

    def test_nothing_measured_is_not_met(self):
        self.assertIsNot(self.verdict([[10], []]).met, True)


    def test_zero_copy_is_judged_against_the_same_path_without(self):
        made = {f.key: f for f in figures.make(bench.parse_arguments(["--build-dir", "/nowhere"]))}
        one = made["iperf3_zero_copy"]
        self.assertEqual([(load.key, v.name) for load, v in one.needs], [("iperf3_128K", "shm"), ("iperf3_128K_Z", "shm")])
        self.assertIs(one.met(one.value([{"gbit_per_s": 100}, {"gbit_per_s": 115}])), True)
        self.assertIs(one.met(one.value([{"gbit_per_s": 100}, {"gbit_per_s": 114}])), False)


class RdmaTest(unittest.TestCase):
    def options(self, *argv):
        return compare.parse_arguments([*argv, "--build-dir", "/nowhere"])

    def test_bandwidth_is_timed_between_head_and_row(self):
        text = "9.0 Device\n10.5  #bytes     #iterations  BW\n14.5 65536      300      54.88   17.61\n14.6 ---\n"
        self.assertEqual(verbs.elapsed(text, 65536, 300), 4.0)
        for bad in ("", text.replace("#bytes", ""), text.replace("14.5", "10.4"), text.replace("300", "301")):
            with self.assertRaises(runner.RunError):
                verbs.elapsed(bad, 65536, 300)

    def test_calls_of_the_process_count_and_posts_are_apart(self):
        text = ("{ common_pid:         11, id: sys_write                     [  1] } hitcount:        40\n"
                "{ common_pid:         12, id: sys_poll                      [  7] } hitcount:         5\n"
                "{ common_pid:         99, id: sys_poll                      [  7] } hitcount:      5000\n"
                "{ common_pid:         11, fd:          9 } hitcount:         30\n"
                "{ common_pid:         11, fd:          4 } hitcount:         10\n"
                "window 10.0 12.0\ntask 11 11\ntask 12 11\nof 11\n"
                "lrwx------ 1 root root 64 Jan  1 00:00 9 -> /dev/infiniband/uverbs0\n"
                "lrwx------ 1 root root 64 Jan  1 00:00 4 -> /dev/pts/0\n")
        self.assertEqual(observe.read_counts(text), (2.0, {"write": 10, "poll": 5, "post": 30}))
        # What has ended makes no calls: that must not read as the best of figures.
        for bad in ("mount: permission denied", text + "gone 11\n", text.replace("uverbs", "rdma_cm")):
            with self.assertRaises(runner.RunError):
                observe.read_counts(bad)
        rates = collections.Counter({"poll": 6, "write": 4, "post": 200})
        self.assertEqual(observe.per_message({"messages_per_s": 100, "bytes_per_s": 4e6}, rates),
                         {"calls_per_message": 0.1, "posts_per_message": 2, "calls_per_mb": 2.5, "posts_per_mb": 50,
                          "poll_per_message": 0.06, "write_per_message": 0.04})

    def test_raw_verbs_stand_in_where_they_can(self):
        rows = {load.key: {v.name: what.key for v, what in row}
                for load, row in compare.Plan(self.options("--paths", "tcp,rdma"), True).runs()}
        self.assertEqual(rows["iperf3_128K"]["verbs"], "write_bw_65536")
        self.assertEqual(rows["rtt_64"]["verbs"], "pingpong_64")
        self.assertNotIn("verbs", rows["stream_64"])
        plain = compare.Plan(self.options("--paths", "tcp,shm,rdma"), False)
        self.assertEqual([v.name for v in plain.variants], ["tcp", "shm"])
        self.assertEqual(plain.raw, {})

    def test_another_s_failure_is_shown_and_waited_for_once(self):
        class Load:
            calls = 0

            def run(self, run, variant):
                self.calls += 1
                raise runner.RunError("it hangs")

        load, one = Load(), report.Series(runner.Variant("rspreload", other=True))
        for _ in range(3):
            one.measure(None, load)
        self.assertEqual(load.calls, 1)
        self.assertEqual(compare.cell({"rspreload": one}, one.variant, "gbit_per_s"), "failed")
        self.assertEqual(compare.cell({}, one.variant, "gbit_per_s"), "-")

    def test_no_series_of_here_is_taken_for_one_of_there(self):
        options = bench.parse_arguments(["--build-dir", "/nowhere"])
        keys = [{(load.key, variant.name) for figure in made for load, variant in figure.needs}
                for made in (figures.make(options), figures_rdma.make(options))]
        self.assertFalse(keys[0] & keys[1])


class RunnerTest(unittest.TestCase):
    def test_the_plain_side_sees_no_shim(self):
        os.environ["LD_PRELOAD"], os.environ["RSOCK_LOG"] = "", "debug"
        try:
            plain = runner.environment(runner.Variant.plain(), "/s")
            shim = runner.environment(runner.Variant.shim("/lib", "shm"), "/s")
        finally:
            del os.environ["LD_PRELOAD"], os.environ["RSOCK_LOG"]
        self.assertFalse([k for k in plain if k.startswith("RSOCK_") or k == "LD_PRELOAD"])
        self.assertEqual((shim["LD_PRELOAD"], shim["RSOCK_PATH"], shim["RSOCK_SUMMARY"],
                          shim["RSOCK_LOG"]), ("/lib", "shm", "/s", "debug"))

    def test_cpu_time_of_a_pair_is_told(self):
        burn = "import time\nwhile time.process_time() < 0.1: pass"
        with runner.Runner() as run:
            result = run.pair(runner.Variant.plain(),
                              lambda f: (["sh", "-c", f"echo 7 >{f}; exec '{sys.executable}' -c '{burn}'"], None),
                              lambda port: [sys.executable, "-c", burn], 5)
        self.assertGreaterEqual(result.cpu_seconds, 0.2)

    def test_a_server_that_dies_and_a_client_that_fails_are_named(self):
        with runner.Runner() as run:
            plain = runner.Variant.plain()
            with self.assertRaisesRegex(runner.RunError, "server ended at once.*broken"):
                run.pair(plain, lambda f: (["sh", "-c", "echo broken >&2; exit 3"], None), None, 1)
            server = lambda f: (["sh", "-c", f"echo 7 >{f}; exec sleep 60"], None)
            with self.assertRaisesRegex(runner.RunError, "client ended with status 4"):
                run.pair(plain, server, lambda port: ["sh", "-c", "exit 4"], 1)
            with self.assertRaisesRegex(runner.RunError, "client ended with SIGSEGV"):
                run.pair(plain, server, lambda port: ["sh", "-c", "kill -SEGV $$"], 1)
            self.assertEqual(run._live, [])

    def test_a_file_to_send_is_made_once_on_disk_and_removed(self):
        with runner.Runner() as run:
            path = run.file((1 << 20) + 5)
            made = os.stat(path)
            self.assertEqual(made.st_size, (1 << 20) + 5)
            self.assertEqual(os.stat(run.file((1 << 20) + 5)).st_mtime_ns, made.st_mtime_ns)
            self.assertNotEqual(run.file(3), path)
        self.assertFalse(os.path.exists(path))

    def test_a_file_is_not_put_into_memory_where_there_is_a_disk(self):
        if runner.filesystem("/dev/shm") != "tmpfs" or runner.filesystem("/var/tmp") == "tmpfs":
            self.skipTest("no tmpfs here, or nothing else")
        usual, runner.tempfile.tempdir = runner.tempfile.tempdir, "/dev/shm"
        try:
            with runner.Runner() as run:
                self.assertNotEqual(runner.filesystem(run.file(1)), "tmpfs")
        finally:
            runner.tempfile.tempdir = usual

    def leaves_nothing_after(self, number):
        code = ("import runner\n"
                "try:\n"
                " with runner.Runner() as run:\n"
                "  print(run.folder, flush=True)\n"
                "  run.pair(runner.Variant.plain(), lambda f: (['sh', '-c', f'echo 7 >{f}; echo $$ "
                ">{f}.pid; exec sleep 60'], None), lambda port: ['sleep', '60'], 1)\n"
                "except KeyboardInterrupt: raise SystemExit(130)\n")
        process = subprocess.Popen([sys.executable, "-B", "-c", code], stdout=subprocess.PIPE,
                                   text=True, cwd=os.path.dirname(os.path.abspath(__file__)))
        folder = process.stdout.readline().strip()
        pid_file = os.path.join(folder, "1.port.pid")
        limit = time.monotonic() + 10
        while not (os.path.exists(pid_file) and os.path.getsize(pid_file)):
            self.assertLess(time.monotonic(), limit)
            time.sleep(0.01)
        with open(pid_file) as file:
            server = int(file.read())
        time.sleep(0.1)  # let the client start too
        process.send_signal(number)
        process.wait(timeout=10)
        process.stdout.close()
        limit = time.monotonic() + 5
        while os.path.exists(f"/proc/{server}"):
            self.assertLess(time.monotonic(), limit, "the server outlived the script")
            time.sleep(0.01)
        left = os.path.exists(folder)
        shutil.rmtree(folder, ignore_errors=True)
        return process.returncode, left

    def test_interrupt_and_termination_leave_nothing(self):
        for number in (signal.SIGINT, signal.SIGTERM):
            with self.subTest(number=number):
                self.assertEqual(self.leaves_nothing_after(number), (130, False))

    def test_even_a_killed_script_leaves_no_process(self):
        status, folder_left = self.leaves_nothing_after(signal.SIGKILL)
        self.assertEqual(status, -signal.SIGKILL)
        self.assertTrue(folder_left)  # nobody is left who could remove it


class PlotTest(unittest.TestCase):
    def test_missing_values_still_give_a_picture(self):
        panels = [plot.Panel("a", "u", True, [("x", {"tcp": 1.0, "shm": None})]),
                  plot.Panel("b", "u", True, [("x", {"tcp": None, "shm": None})])]
        with runner.Runner() as run:
            base = os.path.join(run.folder, "picture")
            fault = plot.draw('a "title"', panels, ["tcp", "shm"], base)
            if fault and "No such file" in fault:
                self.skipTest("gnuplot is not installed")
            self.assertIsNone(fault)
            for suffix in ("svg", "png"):
                self.assertGreater(os.path.getsize(f"{base}.{suffix}"), 1000)


if __name__ == "__main__":
    unittest.main()
