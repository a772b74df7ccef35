#!/usr/bin/env bash
# Two "hosts" on one machine: two network namespaces joined by a veth pair. Needs root and iproute2.
#   two_hosts.sh PROCESSES_PER_HOST ARGUMENT…      each host runs: torchrun … ARGUMENT…
#   two_hosts.sh --check                           can namespaces be made here? (exit 0: yes)
# What each host says is in $LOG.0 and $LOG.1 (default: two_hosts.0, two_hosts.1 in the working folder).
set -u
a="rlhf0-$$" b="rlhf1-$$" va="ra$$" vb="rb$$" log="${LOG:-two_hosts}"

tear_down() {
    local name
    for name in "$a" "$b"; do
        ip netns pids "$name" 2>/dev/null | xargs -r kill 2>/dev/null
        ip netns del "$name" 2>/dev/null
    done
}
trap tear_down EXIT

set_up() {
    ip netns add "$a" && ip netns add "$b" && ip link add "$va" type veth peer name "$vb" || return 1
    ip link set "$va" netns "$a" && ip link set "$vb" netns "$b" || return 1
    ip -n "$a" addr add 10.77.0.1/24 dev "$va" && ip -n "$b" addr add 10.77.0.2/24 dev "$vb" || return 1
    ip -n "$a" link set lo up && ip -n "$b" link set lo up && ip -n "$a" link set "$va" up && ip -n "$b" link set "$vb" up
}

if ! set_up; then
    echo "network namespaces cannot be made here (root and iproute2 are needed)" >&2
    exit 3
fi
[ "$1" != --check ] || exit 0

processes="$1"; shift
python="${PYTHON:-python}"
host() { # namespace, device, address, rank, arguments…
    local name="$1" device="$2" address="$3" rank="$4"; shift 4
    GLOO_SOCKET_IFNAME="$device" ip netns exec "$name" "$python" -m torch.distributed.run --nnodes 2 \
        --nproc-per-node "$processes" --node-rank "$rank" --master-addr 10.77.0.1 --master-port 29500 \
        --local-addr "$address" "$@"
}
host "$a" "$va" 10.77.0.1 0 "$@" >"$log.0" 2>&1 & first=$!
host "$b" "$vb" 10.77.0.2 1 "$@" >"$log.1" 2>&1 & second=$!
wait "$first"; one=$?
wait "$second"; two=$?
ip netns exec "$a" awk -v device="$va:" '$1 == device {print "bytes received by the first host: " $2}' /proc/net/dev
exit $((one + two))
