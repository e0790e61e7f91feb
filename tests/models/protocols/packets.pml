/* Packets whose flags wrap (device/kernels/packets.h), with flags of FLAG_BITS bits instead of 32.
 *
 * Two ranks exchange packets for more than two laps of the flags. Places alternate with the epoch. Each epoch has a packet
 * in place 0, and one in place 1 only if its call is long, so place 1 may keep an old packet for a lap. Before a flag
 * repeats, the ranks clear their packets: twice in each quarter of a lap, once for each parity.
 *
 * Properties: a rank takes no packet of another epoch; every packet that was sent is taken.
 */
#include "bugs.pml"

#define FLAG_BITS 4
#define FLAGS (1 << FLAG_BITS)
#define CLEAR_INTERVAL (BUG(4) -> FLAGS : FLAGS / 4) /* kClearInterval is a quarter of 2^32 */
#define LAST_EPOCH (2 * FLAGS + 3)

/* flag() of packets.h: the epoch plus one, except for the last of a lap, which would be 0. */
#define FLAG(e) (e % FLAGS == FLAGS - 1 -> (BUG(3) -> 0 : FLAGS / 2) : e % FLAGS + 1)
#define AT(r, e, p) packet[4 * (r) + 2 * ((e) % 2) + (p)]

typedef Packet {
  byte flag;
  byte epoch; /* in which it was sent */
};
Packet packet[8]; /* by rank, parity and place */

bit is_long[2];   /* by parity: whether the epoch's call uses place 1 */
byte begun[2];

#define SEND(p) d_step { AT(1 - r, e, p).flag = FLAG(e); AT(1 - r, e, p).epoch = e }
#define RECEIVE(p) d_step { AT(r, e, p).flag == FLAG(e) -> assert(AT(r, e, p).epoch == e) }

proctype rank(bit r) {
  byte e;
  do
  :: e == LAST_EPOCH -> break
  :: else ->
     /* Both ranks make the same call; the first to arrive chooses it. */
     atomic {
       if
       :: begun[e % 2] == 0 -> if :: is_long[e % 2] = 0 :: is_long[e % 2] = 1 fi
       :: else
       fi;
       begun[e % 2] = (begun[e % 2] + 1) % 2
     }
     SEND(0);
     if
     :: is_long[e % 2] -> SEND(1); RECEIVE(1)
     :: else
     fi;
     RECEIVE(0);
     if
     :: e % CLEAR_INTERVAL < (BUG(2) -> 1 : 2) && !BUG(1) -> AT(r, e, 0).flag = 0; AT(r, e, 1).flag = 0
     :: else
     fi;
     e++
  od
}

init {
  CHOOSE_BUG;
  atomic { run rank(0); run rank(1) }
}
