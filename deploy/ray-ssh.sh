#!/usr/bin/env bash
# A Ray cluster over plain ssh, without Ray's autoscaler: deploy/ray-ssh.sh up|check|down HEAD WORKER...
# HEAD and WORKER are IP addresses that every host can reach. Needs: ssh from here to each host without a password, and
# this repository with `make install` done in BATON_DIR (default /opt/baton) on each. The cluster's secret is made here
# and kept on the hosts, in ~/.baton-ray-token, readable by its owner only.
set -euo pipefail

usage() { sed -n '2,5s/^# //p' "$0" >&2; exit 2; }
[ $# -ge 2 ] || usage
action=$1 head=$2
shift 2
dir=${BATON_DIR:-/opt/baton}
env="export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=\$HOME/.baton-ray-token RAY_USAGE_STATS_ENABLED=0;"

on() { # on HOST COMMAND: run it there; standard input goes along
  ssh -o BatchMode=yes -o ConnectTimeout=10 "$1" "$env $2"
}

up() {
  token=$(head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n')
  for host in "$head" "$@"; do
    echo "$token" | on "$host" 'umask 077; cat > ~/.baton-ray-token'
  done
  start="$dir/.venv/bin/ray start --disable-usage-stats"
  on "$head" "$start --head --port=6379 --node-ip-address=$head --include-dashboard=false" < /dev/null
  for host in "$@"; do
    on "$host" "$start --address=$head:6379 --node-ip-address=$host" < /dev/null &
  done
  wait
  check "$@"
}

check() { # lists expected and joined nodes; fails when one is missing
  expected=$(IFS=,; echo "$head${*:+,$*}")
  on "$head" "$dir/.venv/bin/baton nodes --address $head:6379 --expect $expected" < /dev/null
}

down() { # `ray stop` ends every Ray process of a host: use hosts that run nothing else with Ray
  for host in "$@" "$head"; do
    on "$host" "$dir/.venv/bin/ray stop; rm -f ~/.baton-ray-token" < /dev/null || echo "cannot stop Ray on $host" >&2
  done
}

case $action in
  up | check | down) "$action" "$@" ;;
  *) usage ;;
esac
