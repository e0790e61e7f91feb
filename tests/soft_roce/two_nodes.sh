#!/bin/sh
# Shows, in two machines, that they reach each other: node 1 writes into node 0's memory (perftest).
set -- --ib-dev "$SOFT_ROCE_DEVICES" --gid-index 1 --size 4096 --iters 50 --output bandwidth
if [ "$SOFT_ROCE_NODE" = 0 ]; then
  exec timeout 120 ib_write_bw "$@"
fi
attempts=60
until timeout 60 ib_write_bw "$@" "$SOFT_ROCE_PEER"; do
  attempts=$((attempts - 1))
  [ $attempts -gt 0 ] || exit 1
  sleep 1  # node 0 does not listen yet
done
