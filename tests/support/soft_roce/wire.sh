#!/bin/sh
# The wire between Soft-RoCE devices, inside the machine.
#
#   wire.sh pair          two devices, rxe0 and rxe1, on the two ends of a wire: veth0 and veth1
#   wire.sh node NUMBER   one device, rxe0, on the machine's own network interface: this end of a wire between machines
#   wire.sh restore       the pair after ends of it were set down
set -e
NETWORK=10.9.0

# Both ends have their address in this machine, so the kernel would hand packets over without a wire. Each end has its
# own route to the other, which comes before the table of local addresses; that table comes first only for packets that
# arrived from the wire.
pair() {
  ip link add veth0 mtu 4200 type veth peer name veth1 mtu 4200
  for interface in all veth0 veth1; do
    echo 0 >/proc/sys/net/ipv4/conf/$interface/rp_filter
    echo 1 >/proc/sys/net/ipv4/conf/$interface/accept_local
  done
  ip -batch - <<END
    rule add pref 100 lookup local
    rule add pref 1 iif veth0 lookup local
    rule add pref 1 iif veth1 lookup local
    rule add pref 10 to $NETWORK.2 lookup 100
    rule add pref 10 to $NETWORK.1 lookup 101
    rule del pref 0
    addr add $NETWORK.1/32 dev veth0
    addr add $NETWORK.2/32 dev veth1
END
  up
  rdma link add rxe0 type rxe netdev veth0
  rdma link add rxe1 type rxe netdev veth1
  wait_for_devices rxe0 rxe1
}

restore() {
  up
  wait_for_devices rxe0 rxe1
}

# An end that goes down loses its route.
up() {
  ip -batch - <<END
    link set veth0 up
    link set veth1 up
    route replace $NETWORK.2 dev veth0 src $NETWORK.1 table 100
    route replace $NETWORK.1 dev veth1 src $NETWORK.2 table 101
END
}

node() {
  ip addr add $NETWORK.$(($1 + 1))/24 dev eth0
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
