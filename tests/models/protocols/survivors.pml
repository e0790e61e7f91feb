/* Ranks of which some may end at any time find out who goes on (channels/joining/survivors.py). If LATE is set, a rank
 * that waits too long goes on without those that have not arrived: then one that is only slow may be left behind.
 *
 * Properties: all that succeed do so in the same attempt, with the same members, all of which have joined; nobody that
 * is left behind is a member; only late ranks are left behind; nobody waits forever.
 */
#include "constants.h"
#include "bugs.pml"

#define RANKS 3
#ifndef DEATHS
#define DEATHS 2 /* most ranks that end */
#endif
#ifndef LATE
#define LATE 0
#endif
#ifndef ATTEMPTS
#define ATTEMPTS 3
#endif
#define ALL ((1 << RANKS) - 1)
#define OPEN 0
#define FAILED 1
#define SUCCEEDED 2
#define EXCLUDED 255

byte arrived[ATTEMPTS], joined[ATTEMPTS]; /* a bit for each rank's note */
bool ended[RANKS];
byte deaths;
byte proposal[ATTEMPTS * RANKS]; /* the ranks' answers to the question of who the members are */
byte decision[ATTEMPTS];         /* the rank whose answer won, plus one */
byte outcome[ATTEMPTS];
byte result[RANKS]; /* the attempt that succeeded, plus one; or EXCLUDED */

#define HAS(set, member) (((set) >> (member)) & 1)
#define MAY_END \
  if \
  :: deaths < DEATHS -> atomic { deaths++; ended[r] = true }; goto end \
  :: true \
  fi

#define CAME(p) HAS(missing, p) && (HAS(arrived[attempt], p) || ended[p]) -> missing = missing & ~(1 << p)
#define JOINED(p) HAS(missing, p) && HAS(joined[attempt], p) -> missing = missing & ~(1 << p)
/* A rank that has ended no longer joins, so it does not matter which of the two is read first. */
#define IS_LOST(p) HAS(missing, p) && !HAS(joined[attempt], p) && ended[p] -> lost = true

proctype rank(byte r) {
  byte attempt, candidates = ALL, missing, members, p;
  bool lost;
again:
  MAY_END;
  arrived[attempt] = arrived[attempt] | (1 << r);
  missing = (LATE -> 0 : candidates & ~(1 << r)); /* a wait that may end at any time is none */
  do
  :: missing == 0 || decision[attempt] -> break
  :: CAME(0)
  :: CAME(1)
  :: CAME(2)
  od;
  if
  :: BUG(1) -> atomic { decision[attempt] = (decision[attempt] -> decision[attempt] : r + 1) }
  :: else -> skip
  fi;
  proposal[attempt * RANKS + r] = candidates & arrived[attempt];
  MAY_END;
  d_step {
    decision[attempt] = (decision[attempt] -> decision[attempt] : r + 1);
    members = proposal[attempt * RANKS + (BUG(2) -> r : decision[attempt] - 1)];
    assert(members);
    missing = 0;
    if /* an answer that lost is not read: fewer states */
    :: decision[attempt] != r + 1 && !BUG(1) -> proposal[attempt * RANKS + r] = 0
    :: else -> skip
    fi
  };
  if
  :: !HAS(members, r) && !BUG(3) -> assert(LATE); result[r] = EXCLUDED; goto end
  :: else -> skip
  fi;
  if /* data of a rank that has ended may be gone */
  :: (HAS(members, 0) && ended[0]) || (HAS(members, 1) && ended[1]) || (HAS(members, 2) && ended[2]) -> lost = true
  :: true -> joined[attempt] = joined[attempt] | (1 << r)
  fi;
  missing = (LATE -> members & ~joined[attempt] : members);
  do
  :: missing == 0 || LATE || lost || outcome[attempt] -> break
  :: JOINED(0)
  :: JOINED(1)
  :: JOINED(2)
  :: IS_LOST(0)
  :: IS_LOST(1)
  :: IS_LOST(2)
  od;
  MAY_END;
  if
  :: BUG(4) -> missing = 0
  :: else -> skip
  fi;
  d_step {
    outcome[attempt] = (outcome[attempt] && !BUG(5) -> outcome[attempt] : (missing -> FAILED : SUCCEEDED));
    missing = 0;
    lost = false;
    if
    :: outcome[attempt] == SUCCEEDED ->
         assert((joined[attempt] & members) == members);
         for (p : 0 .. RANKS - 1) {
           assert(result[p] == 0 || (result[p] == EXCLUDED -> !HAS(members, p) : result[p] == attempt + 1));
           assert(result[p] != attempt + 1 || HAS(members, p))
         };
         p = 0;
         result[r] = attempt + 1
    :: else -> candidates = members; attempt++
    fi;
    members = 0
  };
  if
  :: result[r] == 0 && attempt < ATTEMPTS -> goto again
  :: else -> assert(LATE || result[r]) /* each attempt except the last has lost a rank */
  fi;
end:
  skip
}

init {
  byte r;
  CHOOSE_BUG;
  atomic {
    for (r : 0 .. RANKS - 1) { run rank(r) }
  }
}
