"""iperf3 and sockperf, judged by their own reports and by the shim's summaries."""

import json

import trial

# On this machine's own device where it has one.
group = trial.Group(trial.LabKind(guests=False))
matrix = trial.script("iperf3_matrix")
sockperf = trial.script("sockperf_modes")
MIB = 1 << 20

ROWS = [
    matrix.Row("default", "-t 2", seconds=2.0),
    matrix.Row("reverse", "-t 2 -R", seconds=2.0),
    matrix.Row("bidir", "-t 3 --bidir", streams=2, seconds=3.0),
    matrix.Row("parallel_8", "-t 4 -P 8", streams=8, seconds=4.0),
    matrix.Row("length_64", "-t 2 -l 64", seconds=2.0),
    matrix.Row("length_1m", "-t 2 -l 1M", seconds=2.0),
    matrix.Row("bytes_exact", "-n 48M", exact=48 * MIB),
    matrix.Row("bytes_exact_reverse", "-n 48M -R", exact=48 * MIB),
]
JUDGED = ("default", "reverse", "bidir")  # beside them the same over plain TCP, whose report has the fields


def report_of(t, program, status):
    if not t.expect(f"{program.name} ends with 0", status == 0, status):
        return None
    try:
        report = json.loads(program.out)
    except ValueError as why:
        t.expect(f"{program.name} writes JSON", False, why)
        return None
    t.expect(f"{program.name} reports no error", "error" not in report, report.get("error"))
    return report


def iperf3(t, row, shim):
    """Both programs and their reports."""
    server = t.start(t.server, f"iperf3 -s -1 -J -p {t.port}", shim, listens=True)
    client = t.start(t.client, f"iperf3 -c {t.server.address} -p {t.port} -J {' '.join(row.client)}", shim)
    reports = [report_of(t, client, t.finish(client, 60)), report_of(t, server, t.finish(server, 20))]
    return client, server, reports


def row_case(t, row):
    judges = None
    if row.name in JUDGED:
        judges = iperf3(t, row, False)[2]
        t.port += 1
    client, server, reports = iperf3(t, row, True)
    t.expect_lifted(client, server, streams=row.streams)
    if not all(reports):
        return
    for report, judge in zip(reports, judges or (None, None)):
        complaints = matrix.rate_complaints(report)
        complaints += matrix.field_complaints(report, judge) if judge else []
        for complaint in complaints:
            t.expect("iperf3's report is right", False, complaint)
    for complaint in matrix.tcp_complaints(reports[0], row) + matrix.count_complaints(row, *reports):
        t.expect("iperf3's counts are right", False, complaint)
    rate = reports[0]["end"]["sum_received"]["bits_per_second"] / 1e9
    t.note += f" {rate:.2f} Gbit/s"
    if judges and judges[0]:
        t.note += f" (TCP {judges[0]['end']['sum_received']['bits_per_second'] / 1e9:.2f})"


for row in ROWS:
    group.add(row.name, lambda t, row=row: row_case(t, row))


@group.case()
def as_text(t):
    server = t.start(t.server, f"iperf3 -s -1 -p {t.port}", listens=True)
    client = t.start(t.client, f"iperf3 -c {t.server.address6 or t.server.address} -p {t.port} -t 4")
    for program in (client, server):
        t.expect(f"{program.name} ends with 0", t.finish(program) == 0, program.process.rc)
    t.expect("it reports a sum", "receiver" in client.out and "receiver" in server.out, client.out[-500:])
    t.expect_lifted(client, server)


@group.case()
def sockperf_ping_pong(t):
    at = f"--tcp -i {t.server.address} -p {t.port}"
    server = t.start(t.server, f"sockperf server {at}", listens=True)
    client = t.start(t.client, f"sockperf ping-pong -m 64 -t 4 --mps 20000 {at}")
    status = t.finish(client, 60)
    server_status = t.stop(server, 2)
    t.expect("both end with 0", (status, server_status) == (0, 0), (status, server_status))
    text = sockperf.plain(client.out)
    for complaint in sockperf.client_complaints(text, False):
        t.expect("sockperf's report is right", False, complaint)
    sent = sockperf.sent_by_client(text)
    handled = sockperf.re.search(r"Total (\d+) messages received", sockperf.plain(server.out))
    t.expect("both count alike", sent and handled and int(handled.group(1)) >= sent - 1, (sent, handled))
    t.expect_lifted(client, server, share=0.3)
    latency = sockperf.re.search(r"Latency is [\d.]+ usec", text)
    t.note += " " + latency.group(0) if latency else ""
