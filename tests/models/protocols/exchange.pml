/* Three ranks meet in exchanges (channels/joining/exchange.py) until they leave (channels/liveness/watcher.py,
 * channels/segment/control.py). If a rank waits for a peer that has left after fewer exchanges, it notices, and ends
 * the group.
 *
 * Properties: nobody waits forever, and a rank finds a difference only if there is one.
 */
#include "constants.h"
#include "bugs.pml"

#define RANKS 3
#ifndef EXCHANGES
#define EXCHANGES 2 /* most exchanges that a rank makes before it leaves */
#endif

byte wanted[RANKS]; /* exchanges in a rank's program */
byte came[RANKS];   /* exchanges to which it has brought its value */
byte presence[RANKS], exchanges[RANKS]; /* words of its control block */
bool aborted;       /* the abort words, which are raised on all ranks of the host */

#define HAVE_COME(exchange) (came[0] >= exchange && came[1] >= exchange && came[2] >= exchange)
#define LEFT_BEFORE(peer, exchange) \
  (!BUG(1) && presence[peer] == PROXYCCL_LEFT && exchanges[peer] < exchange + BUG(2))

proctype rank(byte r) {
  byte made, peer;
  do
  :: made < wanted[r] ->
       made++;
       came[r] = made;
       peer = RANKS;
       if
       :: HAVE_COME(made)
       :: aborted -> goto end
       :: LEFT_BEFORE(0, made) -> peer = 0
       :: LEFT_BEFORE(1, made) -> peer = 1
       :: LEFT_BEFORE(2, made) -> peer = 2
       fi;
       if
       :: peer < RANKS -> assert(wanted[peer] < wanted[r]); aborted = true; goto end
       :: else -> skip
       fi
  :: else -> break
  od;
  if
  :: BUG(3) -> presence[r] = PROXYCCL_LEFT; exchanges[r] = made
  :: else -> exchanges[r] = made; presence[r] = PROXYCCL_LEFT
  fi;
end:
  skip
}

init {
  byte r;
  CHOOSE_BUG;
  do
  :: r < RANKS ->
       presence[r] = PROXYCCL_PRESENT;
       do
       :: wanted[r] < EXCHANGES -> wanted[r]++
       :: break
       od;
       r++
  :: else -> break
  od;
  atomic { run rank(0); run rank(1); run rank(2) }
}
