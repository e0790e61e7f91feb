/* Three ranks close two communicators, each rank in its own order (channels/group.py). A rank frees the memory of a
 * communicator that peers reach when all have left it. It waits for that, unless all ranks that have not left wait for
 * the end of the other communicator: then a separate thread frees it later.
 *
 * Properties: nothing is freed that a peer may still reach; everything is freed in the end; no rank waits forever.
 */
#include "constants.h"
#include "bugs.pml"

#define RANKS 3
#define GROUPS 2

typedef Group {
  byte presence[RANKS]; /* words of the control blocks */
  byte freed;           /* by this many ranks */
};
Group group[GROUPS];

#define IS_LEFT(g, r) (group[g].presence[r] == PROXYCCL_LEFT)
#define IS_ELSEWHERE(g, r) (group[g].presence[r] == PROXYCCL_CLOSING_ANOTHER)
#define ALL_LEFT(g) (IS_LEFT(g, 0) && IS_LEFT(g, 1) && IS_LEFT(g, 2))
#define NONE_IS_PRESENT(g)                                                                        \
  ((IS_LEFT(g, 0) || IS_ELSEWHERE(g, 0)) && (IS_LEFT(g, 1) || IS_ELSEWHERE(g, 1)) &&              \
   (IS_LEFT(g, 2) || IS_ELSEWHERE(g, 2)))

#define FREE(g) d_step { assert(ALL_LEFT(g)); group[g].freed++ }

proctype release_later(byte g) {
  ALL_LEFT(g);
  FREE(g)
}

proctype rank(byte r) {
  byte g, closed;
  if
  :: g = 0
  :: g = 1
  fi;
  do
  :: closed < GROUPS ->
       group[g].presence[r] = PROXYCCL_LEFT;
       if
       :: closed == 0 && !BUG(1) -> group[1 - g].presence[r] = PROXYCCL_CLOSING_ANOTHER
       :: else -> skip
       fi;
       if
       :: ALL_LEFT(g) -> FREE(g)
       :: !ALL_LEFT(g) && NONE_IS_PRESENT(g) ->
            if
            :: BUG(2) -> FREE(g)
            :: BUG(3) -> ALL_LEFT(g); FREE(g)
            :: else -> run release_later(g)
            fi
       fi;
       if
       :: closed == 0 -> group[1 - g].presence[r] = PROXYCCL_PRESENT
       :: else -> skip
       fi;
       g = 1 - g;
       closed++
  :: else -> break
  od
}

init {
  byte i;
  CHOOSE_BUG;
  do
  :: i < RANKS -> group[0].presence[i] = PROXYCCL_PRESENT; group[1].presence[i] = PROXYCCL_PRESENT; i++
  :: else -> break
  od;
  atomic { run rank(0); run rank(1); run rank(2) }
  _nr_pr == 1;
  assert(group[0].freed == RANKS && group[1].freed == RANKS)
}
