#!/bin/bash
# One node of a Ray cluster, in the foreground until it is ended; `ray_node.sh address` only prints its address.
#   ray_node.sh head           the cluster's first node
#   ray_node.sh HEAD_ADDRESS   another node, which joins the one at that address
# The cluster uses the network MEGATOKEN_INTERFACE (ib0, eth0, ...), by default the machine's first address. Ray also
# listens on the other interfaces: close its ports with a firewall. It refuses clients without the token.
# RAY_AUTH_MODE=token and the same RAY_AUTH_TOKEN must be in the environment of every node.
set -euo pipefail

port=${MEGATOKEN_RAY_PORT:-6379}

own_address() {
    if [ -n "${MEGATOKEN_INTERFACE:-}" ]; then
        ip -4 -o addr show dev "$MEGATOKEN_INTERFACE" scope global | awk '{ sub("/.*", "", $4); print $4; exit }'
    else
        hostname -I | awk '{ print $1 }'
    fi
}

address=$(own_address)
if [ -z "$address" ]; then
    echo "ray_node.sh: $(hostname): no IPv4 address${MEGATOKEN_INTERFACE:+ on $MEGATOKEN_INTERFACE}; set MEGATOKEN_INTERFACE" >&2
    exit 2
fi
case ${1:?head, address, or the address of the head} in
address)
    echo "$address"
    exit
    ;;
head) role=(--head "--port=$port" --include-dashboard=false) ;;
*) role=("--address=$1:$port") ;;
esac
if [ "${RAY_AUTH_MODE:-}" != token ] || [ -z "${RAY_AUTH_TOKEN:-}" ]; then
    echo "ray_node.sh: set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN: without them, anyone who reaches Ray's ports can run code" >&2
    exit 2
fi
# The smallest object store that Ray accepts: samples do not go through it.
exec ray start "${role[@]}" "--node-ip-address=$address" --object-store-memory=83886080 --disable-usage-stats --block
