#!/bin/sh
# The wire between Soft-RoCE devices, inside the machine.
#
#   wire.sh pair          two devices, rxe0 and rxe1, on the two ends of a wire: veth0 and veth1
#   wire.sh wire NUMBER   another pair, such as rxe2 and rxe3, with a wire of its own: veth2 and veth3 if NUMBER is 2
#   wire.sh node NUMBER   one device, rxe0, on the machine's own network interface: this end of a wire between machines
#   wire.sh restore END   the wire whose first end is END, such as 2 for veth2, after ends of it were set down
set -e

pair() {
  ip -batch - <<END
    rule add pref 100 lookup local
    rule del pref 0
END
  disable_filters all
  wire 0
}

# Both ends have their address in this machine, so the kernel would hand packets over without a wire. Each end has its
# own route to the other, which comes before the table of local addresses; that table comes first only for packets that
# arrived from the wire.
wire() {
  other=$(($1 + 1))
  ip link add veth$1 mtu 4200 type veth peer name veth$other mtu 4200
  disable_filters veth$1 veth$other
  ip -batch - <<END
    rule add pref 1 iif veth$1 lookup local
    rule add pref 1 iif veth$other lookup local
    rule add pref 10 to 10.9.$1.2 lookup 10$1
    rule add pref 10 to 10.9.$1.1 lookup 10$other
    addr add 10.9.$1.1/32 dev veth$1
    addr add 10.9.$1.2/32 dev veth$other
END
  up $1
  rdma link add rxe$1 type rxe netdev veth$1
  rdma link add rxe$other type rxe netdev veth$other
  wait_for_devices rxe$1 rxe$other
}

disable_filters() {
  for interface in "$@"; do
    echo 0 >/proc/sys/net/ipv4/conf/$interface/rp_filter
    echo 1 >/proc/sys/net/ipv4/conf/$interface/accept_local
  done
}

restore() {
  up $1
  wait_for_devices rxe$1 rxe$(($1 + 1))
}

# An end that goes down loses its route and its neighbour. The neighbours are permanent, because an end may wait a minute
# for the answer to its ARP request.
up() {
  other=$(($1 + 1))
  ip -batch - <<END
    link set veth$1 up
    link set veth$other up
    route replace 10.9.$1.2 dev veth$1 src 10.9.$1.1 table 10$1
    route replace 10.9.$1.1 dev veth$other src 10.9.$1.2 table 10$other
    neigh replace 10.9.$1.2 dev veth$1 lladdr $(cat /sys/class/net/veth$other/address)
    neigh replace 10.9.$1.1 dev veth$other lladdr $(cat /sys/class/net/veth$1/address)
END
}

node() {
  ip addr add 10.9.0.$(($1 + 1))/24 dev eth0
  ip link set eth0 up
  rdma link add rxe0 type rxe netdev eth0
  wait_for_devices rxe0
}

wait_for_devices() {
  for device in "$@"; do
    port=/sys/class/infiniband/$device/ports/1
    attempts=100
    until grep -q ACTIVE $port/state && grep -q ffff:0a09 $port/gids/*; do
      attempts=$((attempts - 1))
      if [ $attempts = 0 ]; then
        echo "wire.sh: $device does not come up; its port is $(cat $port/state)"
        exit 1
      fi
      sleep 0.1
    done
  done
}

ip link set lo up
"$@"
