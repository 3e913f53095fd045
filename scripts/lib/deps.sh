#!/usr/bin/env bash
# The Debian 12 packages that this project uses, by purpose, and how to install what is missing.
#
# Sourced:  rsock_deps GROUP...        Executed:  scripts/lib/deps.sh [--list] GROUP...
#
# Asks dpkg first, so nothing touches the network and nobody has to be root when all is there.

declare -gA RSOCK_PACKAGES=(
  # Compiler, generator, and the four libraries that librsock.so itself is built against.
  [build]="g++ cmake ninja-build pkg-config librdmacm-dev libibverbs-dev libboost-dev libexpected-dev"
  # Unit tests and micro-benchmarks.
  [unit]="libgtest-dev libgmock-dev libbenchmark-dev"
  # The second compiler: thread-safety analysis, sanitizers, the fuzzers of every decoder.
  [clang]="clang libclang-rt-14-dev libfuzzer-14-dev clang-format clang-tidy"
  # The model checker that runs the protocol's Promela model (it compiles with the C compiler).
  [model]="spin"
  # Real programs that run under the shim in integration tests.
  [programs]="iperf3 sockperf curl python3 libjemalloc2 libtcmalloc-minimal4"
  # Real services (integration/services). Installed, never started: see rsock_install.
  [services]="redis-server redis-tools nginx-light wrk socat curl python3 openssh-server openssh-client postgresql openssl"
  # What tests look at from outside: system calls, bytes on the wire, sockets and namespaces.
  [observe]="strace tcpdump iproute2 lsof"
  # What the measuring scripts need beyond a build.
  [measure]="python3 iperf3 nginx-light curl gnuplot-nox"
  # Guests with a real RDMA stack (scripts/lab), and the programs that are run in them. The guests' kernel is not
  # installed: the lab unpacks it in the build folder. Not rdma-core: of all its daemons and udev rules a lab needs none.
  [lab]="python3 qemu-system-x86 busybox-static kmod cpio iproute2 ibverbs-utils ibverbs-providers rdmacm-utils librdmacm1 perftest iperf3"
)
RSOCK_GROUP_ORDER="build unit clang model programs services observe measure lab"

# Prints the packages of the groups, one a line, each once.
rsock_packages() {
  local group
  for group in "$@"; do
    if [[ $group == all ]]; then
      # shellcheck disable=SC2086
      rsock_packages $RSOCK_GROUP_ORDER
    elif [[ -n ${RSOCK_PACKAGES[$group]:-} ]]; then
      tr ' ' '\n' <<<"${RSOCK_PACKAGES[$group]}"
    else
      echo "deps: unknown group '$group' (known: $RSOCK_GROUP_ORDER all)" >&2
      return 2
    fi
  done | awk '!seen[$0]++'
}

# Prints those of the named packages that are not installed.
rsock_missing() {
  local installed
  # dpkg-query fails when it does not know one of the names; the list of the others still counts.
  # A name may be provided by another package (pkg-config by pkgconf on later releases).
  installed=$(dpkg-query -W -f '${db:Status-Abbrev}|${Package}, ${Provides}\n' 2>/dev/null |
    sed -n 's/^ii *|//p' | sed 's/ *([^)]*)//g; s/, */\n/g')
  local package
  for package in "$@"; do
    grep -qxF -- "$package" <<<"$installed" || echo "$package"
  done
}

# Installs packages, and leaves no daemon behind: Debian starts a service as soon as it is installed, and at every boot
# from then on, but the tests start their own. invoke-rc.d(8) asks /usr/sbin/policy-rc.d first, and 101 means no; one
# that is there already is the machine's own and stays. What is new in /etc/init.d afterwards is disabled. A new PostgreSQL
# would also make a cluster of its own (postgresql-common's maintscripts-functions, configure_version); this file says no.
rsock_install() (
  local guard=/usr/sbin/policy-rc.d cluster=/etc/postgresql-common/createcluster.d/rsock-tests.conf before status=0 name
  local made=()
  trap 'rm -f "${made[@]}"; rmdir --ignore-fail-on-non-empty "${cluster%/*}" "${cluster%/*/*}"' EXIT
  trap 'exit 130' INT TERM
  if [[ ! -e $guard && ! -L $guard ]]; then
    made+=("$guard")
    printf '#!/bin/sh\nexit 101\n' >"$guard" && chmod 755 "$guard" || return
  fi
  made+=("$cluster")
  mkdir -p "${cluster%/*}" && echo "create_main_cluster = off" >"$cluster" || return
  before=$(ls /etc/init.d 2>/dev/null)
  DEBIAN_FRONTEND=noninteractive apt-get -q -o DPkg::Lock::Timeout=300 install -y --no-install-recommends "$@" ||
    status=$?
  for name in $(comm -13 <(sort <<<"$before") <(ls /etc/init.d 2>/dev/null | sort)); do
    update-rc.d "$name" disable || true
  done
  return "$status"
)

# Installs what is missing of the groups. Fails with the command to type when it cannot.
rsock_deps() {
  if ! command -v dpkg-query >/dev/null; then
    echo "deps: no dpkg on this machine; going on with what is installed (needed: Debian 12's $*)" >&2
    return 0
  fi
  local wanted missing
  wanted=$(rsock_packages "$@") || return
  # shellcheck disable=SC2086
  mapfile -t missing < <(rsock_missing $wanted)
  ((${#missing[@]})) || return 0

  if ((EUID != 0)); then
    echo "deps: these packages are missing, and only root can install them. Please run:" >&2
    echo "  sudo apt-get install --no-install-recommends ${missing[*]}" >&2
    return 1
  fi
  echo "deps: installing ${missing[*]}" >&2
  # Everything to stderr: stdout belongs to the caller's results. A stale package list is better
  # than none, so a failing update (no network, but a warm cache) does not end it yet.
  DEBIAN_FRONTEND=noninteractive apt-get -q -o DPkg::Lock::Timeout=300 update >&2 || true
  rsock_install "${missing[@]}" >&2 || {
    echo "deps: apt-get could not install: ${missing[*]}" >&2
    return 1
  }
}

if [[ ${BASH_SOURCE[0]} == "$0" ]]; then
  set -euo pipefail
  if [[ ${1:-} == --list ]]; then
    shift
    rsock_packages "${@:-all}"
  else
    rsock_deps "${@:-all}"
  fi
fi
