"""Real services on one host, their clients on the other, over RDMA: the drivers of integration/services, with small workloads.

Each runs its workload over plain TCP and then with the shim at both ends, between the same two guests; what was seen must be
the same, and the summaries must show the streams on RDMA. The driver and the clients are on the second host, services.py
there has the services started here (integration/services/places.py).
"""

import pathlib
import subprocess
import sys

import trial
import service_programs  # trial knows where

group = trial.Group(trial.TWO_HOSTS)
more = trial.Group(trial.TWO_HOSTS)  # services_more.py
SERVICES = trial.INTEGRATION / "services"

# Cases that are left out, beside what they would show here: replication_disk and bgsave are a fork each like aof_rewrite,
# of nginx's other ways to read files it is the same send.
CASES = {
    "redis": ("benchmark", "pipelines", "pub_sub", "large_values", "bgsave", "replication"),
    "nginx": ("sendfile", "wrk", "proxy", "reload"),
    "python": ("http_server", "asyncio", "managers", "connections", "sendfile"),
    "socat": ("exec", "curl"),
    "postgres": ("pgbench", "copy"),
}


# Of each kind what shows the most in a minute. The others take half an hour together: group services_more.
ALWAYS = {
    "redis": {"benchmark", "replication"},
    "nginx": {"sendfile", "wrk", "proxy"},
    "python": {"connections", "sendfile"},
    "socat": set(),
    "postgres": {"pgbench", "copy"},
}

# Named by every run, and not run. Remove what has been seen to its end.
NOT_YET = {
    "postgres": {"pgbench": "passes, lifted, but takes three minutes between emulated hosts",
                 "copy": "not seen to its end between emulated hosts yet"},
}


def cluster(t):
    """PostgreSQL's data, made by this machine's own processors: an emulated one would take a minute."""
    folder = pathlib.Path(t.lab.shared, "cluster")
    if not pathlib.Path(service_programs.POSTGRES, "initdb").exists():
        raise trial.Unsupported("initdb is not installed (package postgresql)")
    if not folder.exists():
        service_programs.make_postgres_folder(folder)
        subprocess.run([*service_programs.INITDB, folder], check=True, stdout=subprocess.DEVNULL, timeout=100, cwd="/")
    return str(folder)


def serve(t, service, case):
    if case in NOT_YET.get(service, {}):
        raise trial.Unsupported(NOT_YET[service][case])
    place = t.start(t.server, f"{sys.executable} -I -S -B {SERVICES / 'places.py'} {t.server.address} {t.port}", shim=False,
                    listens=True)
    env = {"TMPDIR": str(t.lab.shared), "SERVICES_HOST": t.server.address, "SERVICES_SMALL": "1"}
    if service == "postgres":
        env["SERVICES_CLUSTER"] = cluster(t)
    driver = t.start(t.client, f"{sys.executable} -B {SERVICES / (service + '_service')} --mode rdma "
                     f"--lib '{t.options.library if t.rdma else ''}' --there {t.server.address}:{t.port} {case}",
                     shim=False, env=env)
    status = t.finish(driver, 300)
    if status == 77:
        raise trial.Unsupported(driver.out.strip())
    t.expect(f"{service} {case} is as over TCP", status == 0, driver.out[-8000:] + driver.err[-2000:])
    t.note = " " + " ".join(driver.out.split("\n")[0].split()[2:])
    t.stop(place)


for service, cases in CASES.items():
    for case in cases:
        (group if case in ALWAYS[service] else more).add(
            f"{service}.{case}", lambda t, service=service, case=case: serve(t, service, case))
