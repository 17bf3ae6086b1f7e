#!/usr/bin/env bash
# Disaggregation as between two hosts: the prefill instance runs in one network namespace, the decode instance and the
# router in another one, with a cluster key and a list of peers. Then configurations follow that must be refused.
#
#     sudo examples/disaggregation/two_namespaces.sh
#
# PYTHON names the interpreter that has penstock (default: python). Exit code 0: as expected; 77: no namespaces here.
set -euo pipefail

PYTHON=${PYTHON:-python}
HERE=$(cd "$(dirname "$0")" && pwd)
P_NS=penstock-p-$$ D_NS=penstock-d-$$ LINK=pst$$
P_IP=10.231.7.1 D_IP=10.231.7.2
API_KEY=a-key-for-clients
PROMPT='Once upon a time there was a little bird who lived in an old tree beside the river. One day the bird saw'
WORK=$(mktemp -d)

command -v ip >/dev/null || { echo "ip is missing: install iproute2" >&2; exit 77; }
if ! ip netns add "$P_NS" 2>"$WORK/error"; then
    echo "network namespaces cannot be created here: $(cat "$WORK/error")" >&2
    rm -r "$WORK"
    exit 77
fi

end() {
    trap - EXIT
    kill $(jobs -p) 2>/dev/null || true
    wait 2>/dev/null || true
    ip netns del "$P_NS" 2>/dev/null || true
    ip netns del "$D_NS" 2>/dev/null || true
    rm -rf "$WORK"
}
trap end EXIT
trap 'exit 130' INT TERM

fail() {
    echo "FAILED: $*" >&2
    tail -n 20 "$WORK"/*.log >&2 || true
    exit 1
}

ip netns add "$D_NS"
ip link add "${LINK}p" netns "$P_NS" type veth peer name "${LINK}d" netns "$D_NS"
ip -n "$P_NS" addr add "$P_IP/24" dev "${LINK}p"
ip -n "$D_NS" addr add "$D_IP/24" dev "${LINK}d"
for ns in "$P_NS" "$D_NS"; do ip -n "$ns" link set lo up; done
ip -n "$P_NS" link set "${LINK}p" up
ip -n "$D_NS" link set "${LINK}d" up

(umask 077; head -c 32 /dev/urandom | base64 > "$WORK/cluster.key"; head -c 32 /dev/urandom | base64 > "$WORK/other.key")

# serve NAME NAMESPACE HOST PORT ROLE IP KV_PORT OPTIONS: a server in the background, its messages in NAME.log
serve() {
    ip netns exec "$2" "$PYTHON" -m penstock.cli.main serve --host "$3" --port "$4" --api-key "$API_KEY" \
        --kv-cache-memory 64MB --max-model-len 512 --num-threads 1 --kv-transfer-config "{\"kv_connector\":
        \"NixlConnector\", \"engine_id\": \"$1\", \"kv_role\": \"$5\", \"kv_ip\": \"$6\", \"kv_port\": $7,
        \"kv_load_failure_policy\": \"fail\", \"kv_connector_extra_config\": {$8}}" > "$WORK/$1.log" 2>&1 &
}

# wait_for NAME NAMESPACE URL: until it answers
wait_for() {
    for _ in $(seq 1800); do
        ip netns exec "$2" curl -sf -o /dev/null --max-time 5 "$3" && return
        sleep 0.1
    done
    fail "$1 has not started"
}

# ask NAMESPACE URL: the answer, or the error
ask() {
    ip netns exec "$1" curl -s --max-time 60 "$2/v1/completions" -H 'Content-Type: application/json' \
        -H "Authorization: Bearer $API_KEY" \
        -d "{\"prompt\": \"$PROMPT\", \"max_tokens\": 24, \"temperature\": 0, \"ignore_eos\": true}" |
        "$PYTHON" -c 'import json, sys; a = json.load(sys.stdin)
print(a["error"]["message"] if "error" in a else repr(a["choices"][0]["text"]))'
}

# route NAME DECODE_PORT PORT: the router in front of P and a decode instance, in the namespace of the latter
route() {
    ip netns exec "$D_NS" "$PYTHON" -m penstock.cli.main route --prefill "http://$P_IP:8100" \
        --decode "http://127.0.0.1:$2" --port "$3" > "$WORK/$1.log" 2>&1 &
}

KEY="\"cluster_key_file\": \"$WORK/cluster.key\""
serve prefill "$P_NS" "$P_IP" 8100 kv_producer "$P_IP" 5600 "$KEY"
serve decode "$D_NS" 127.0.0.1 8200 kv_consumer "$D_IP" 5600 "$KEY, \"peers\": [\"$P_IP:5600\"]"
wait_for prefill "$P_NS" "http://$P_IP:8100/ready"
wait_for decode "$D_NS" http://127.0.0.1:8200/ready
route router 8200 8000
wait_for router "$D_NS" http://127.0.0.1:8000/ready
two=$(ask "$D_NS" http://127.0.0.1:8000)
one=$(ask "$P_NS" "http://$P_IP:8100")
loads=$(ip netns exec "$D_NS" curl -s http://127.0.0.1:8200/metrics -H "Authorization: Bearer $API_KEY" |
    sed -n 's/.*name="p2p_consumer_completed"} //p')
echo "one engine:                $one"
echo "across two namespaces:     $two    ($loads transferred)"
[ "$one" = "$two" ] || fail "the answers differ"
[ "${loads%.*}" = 1 ] || fail "the KV was not transferred"

serve strangers "$D_NS" 127.0.0.1 8201 kv_consumer "$D_IP" 5601 "$KEY, \"peers\": [\"10.231.7.99:5600\"]"
serve otherkey "$D_NS" 127.0.0.1 8202 kv_consumer "$D_IP" 5602 \
    "\"cluster_key_file\": \"$WORK/other.key\", \"peers\": [\"$P_IP:5600\"]"
serve nopeers "$D_NS" 127.0.0.1 8203 kv_consumer "$D_IP" 5603 "$KEY"
wait $! && fail "a decode instance has started without a list of peers"
echo "without a list of peers:   $(tail -n 1 "$WORK/nopeers.log")"
grep -q "set peers" "$WORK/nopeers.log" || fail "the error is not the expected one"
wait_for strangers "$D_NS" http://127.0.0.1:8201/ready
wait_for otherkey "$D_NS" http://127.0.0.1:8202/ready
route router-strangers 8201 8001
route router-otherkey 8202 8002
wait_for router-strangers "$D_NS" http://127.0.0.1:8001/ready
wait_for router-otherkey "$D_NS" http://127.0.0.1:8002/ready
strangers=$(ask "$D_NS" http://127.0.0.1:8001)
otherkey=$(ask "$D_NS" http://127.0.0.1:8002)
echo "with another list of peers: $strangers"
echo "with another cluster key:  $otherkey"
[[ $strangers == *"not in the list of peers"* ]] || fail "it was not refused"
[[ $otherkey == *"does not belong to this cluster"* ]] || fail "it was not refused"
