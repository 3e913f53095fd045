# shellcheck shell=bash
# Sourced by scripts/compare and scripts/bench: installs, builds, and runs their Python part.
#
#   rsock_measure NAME ARGUMENT...

source "$(dirname "${BASH_SOURCE[0]}")/deps.sh"

rsock_measure() {
  local name=$1 root build_dir
  shift
  root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
  build_dir=$root/build
  local arguments=() build=yes
  while (($#)); do
    case $1 in
      --build-dir) build_dir=$(realpath -m "${2:?--build-dir needs a folder}"); shift 2 ;;
      --no-build) build=no; shift ;;
      -h | --help) build=no; arguments+=("$1"); shift ;;
      *) arguments+=("$1"); shift ;;
    esac
  done

  # Whether figures of that kind are asked for.
  measures() { [[ $name == bench && " ${arguments[*]} " != *' --only '* || ${arguments[*]} == *$1* ]]; }

  if [[ $build == yes ]]; then
    rsock_deps build measure || return
    # What is missing then is told by lab.py.
    if measures rdma; then rsock_deps lab || true; fi
    if measures service; then rsock_deps services || return; fi
    mkdir -p "$build_dir"
    local log=$build_dir/$name-build.log
    echo "$name: building (log: $log)" >&2
    if ! "$root/scripts/build" --build-dir "$build_dir" >"$log" 2>&1; then
      tail -n 30 "$log" >&2
      echo "$name: the build failed" >&2
      return 1
    fi
  fi
  # -B: no compiled files in the source tree. exec: ^C and SIGTERM reach Python itself.
  exec python3 -B "$root/scripts/lib/$name.py" --build-dir "$build_dir" "${arguments[@]}"
}
