/* A connection over several rails (proxy/engine/rails_transport.c), which may fail and, if RETURNS, are used again. In
 * each round the sender puts two parts, on the first and on the last rail that is up, and then signals on the home rail;
 * the receiver reads both parts and answers by another connection. A rail executes its requests in order. One rail
 * remains at any time. After a failure the sender gets no more completions of the rail, but the receiver's adapter may
 * still execute requests of the rail until the receiver stops its queue pair. A word that tells the receiver of a
 * failure is a request on another rail, which may fail too. The receiver's words always arrive.
 *
 * After a failure both ranks connect their queue pairs of the rail again. If the two queue pairs were connected after
 * different failures, a request may be acknowledged although it is not executed, because its packet looks like a
 * repeated one. The first request on the rail tests the rail, and may fail too.
 *
 * Properties: a signal shows both parts of its round; no part is stored after its round was signalled and so may be read;
 * no signal is stored twice; all rounds end.
 */
#include "bugs.pml"

#ifndef RAILS
#define RAILS 2
#endif
#ifndef ROUNDS
#define ROUNDS 2
#endif
#ifndef FAILURES
#define FAILURES 1
#endif
#ifndef RETURNS
#define RETURNS 1
#endif
#define MADE (3 * ROUNDS + 5 * (FAILURES + 1)) /* most requests of a rail */

mtype = { PART, SIGNAL, TEST, TELL };
mtype = { UP, WAITING, MOVING, DOWN, JOINING, TRYING, LEAVING }; /* stages */

typedef Rail {
  mtype kind[MADE];
  byte value[MADE], part[MADE];
  byte posted, executed, done;
  mtype stage;               /* of the sender */
  byte failures, turn;       /* known to the sender; number of the last one among the failures of all rails */
  bool is_told;              /* the word about the failure is posted */
  byte next;                 /* the request that is moved next */
  byte seen;                 /* the receiver's word `word` at the failure */
  bool broken;               /* the rail gives the sender no completions */
  byte told, answered;       /* the words `down` at the receiver and at the sender */
  byte up;                   /* the word `up` at the sender */
  byte own_life, peer_life;  /* the failures after which the two queue pairs were connected */
  bool stopped;              /* the receiver's queue pair is in its error state */
};

Rail rail[RAILS];
byte home, home_at_first, helper; /* helper: the first rail that is up */
byte turns;
byte memory[2], word, acknowledged;
bool recovers, tested;

#define IS_RECOVERING(r) (rail[r].stage == WAITING || rail[r].stage == MOVING)
#define IS_QUIET(r) (rail[r].stage != UP || rail[r].done == rail[r].posted)
#define IS_JOINED(r) (rail[r].own_life == rail[r].peer_life)
#define WORKS(r) (rail[r].stage == UP && !rail[r].broken && rail[r].answered == rail[r].failures)
#if RAILS == 2
#define LAST_UP (rail[1].stage == UP -> 1 : 0)
#define IS_LAST_FAILED(r) !(IS_RECOVERING(1 - (r)) && rail[1 - (r)].turn > rail[r].turn)
#define ANOTHER_WORKS(r) WORKS(1 - (r))
#define ALL_QUIET (IS_QUIET(0) && IS_QUIET(1))
#else
#define LAST_UP (rail[2].stage == UP -> 2 : (rail[1].stage == UP -> 1 : 0))
#define IS_BEFORE(r, s) (IS_RECOVERING(s) && rail[s].turn > rail[r].turn)
#define IS_LAST_FAILED(r) !(IS_BEFORE(r, ((r) + 1) % 3) || IS_BEFORE(r, ((r) + 2) % 3))
#define ANOTHER_WORKS(r) (WORKS(((r) + 1) % 3) || WORKS(((r) + 2) % 3))
#define ALL_QUIET (IS_QUIET(0) && IS_QUIET(1) && IS_QUIET(2))
#endif

inline post(on, what, number, half) {
  rail[on].kind[rail[on].posted] = what;
  rail[on].value[rail[on].posted] = number;
  rail[on].part[rail[on].posted] = half;
  rail[on].posted++
}

/* Enters a stage. Sets the rails that follow from all stages. */
inline enter(r, entered) {
  rail[r].stage = entered;
  recovers = false;
  helper = RAILS;
  home = home_at_first;
  each = 0;
  do
  :: each < RAILS ->
       recovers = recovers || IS_RECOVERING(each);
       if
       :: helper == RAILS && rail[each].stage == UP -> helper = each
       :: else
       fi;
       if
       :: rail[home].stage != UP -> home = (home + 1) % RAILS
       :: else
       fi;
       each++
  :: else -> break
  od;
  each = 0
}

inline note_failure(r, entered) {
  turns++;
  rail[r].turn = turns;
  rail[r].seen = word;
  each = 0;
  do
  :: each < RAILS ->
       if
       :: each == r || !BUG(7) -> rail[each].is_told = false
       :: else
       fi;
       each++
  :: else -> break
  od;
  enter(r, entered)
}

proctype execute(byte r) {
  byte number;
end:
  do
  :: d_step { rail[r].executed < rail[r].posted && !rail[r].stopped ->
       number = rail[r].executed;
       if
       :: !IS_JOINED(r) || rail[r].kind[number] == TEST -> skip
       :: IS_JOINED(r) && rail[r].kind[number] == TELL -> rail[rail[r].part[number]].told = rail[r].value[number]
       :: IS_JOINED(r) && rail[r].kind[number] == SIGNAL ->
            assert(rail[r].value[number] == word + 1);
            word = rail[r].value[number]
       :: IS_JOINED(r) && rail[r].kind[number] == PART ->
            assert(rail[r].value[number] > word);
            memory[rail[r].part[number]] = rail[r].value[number]
       fi;
       rail[r].executed++;
       number = 0
     }
  :: d_step { rail[r].done < rail[r].executed && !rail[r].broken && !IS_RECOVERING(r) -> rail[r].done++ }
  od
}

proctype fail() {
  byte left = FAILURES, r;
end:
  do
  :: d_step { left > 0 && WORKS(0) && ANOTHER_WORKS(0) -> left--; rail[0].broken = true }
  :: d_step { left > 0 && WORKS(1) && ANOTHER_WORKS(1) -> left--; rail[1].broken = true }
#if RAILS > 2
  :: d_step { left > 0 && WORKS(2) && ANOTHER_WORKS(2) -> left--; rail[2].broken = true }
#endif
#if RETURNS
  :: d_step { left > 0 && rail[0].stage == TRYING && !rail[0].broken -> left--; rail[0].broken = true }
  :: d_step { left > 0 && rail[1].stage == TRYING && !rail[1].broken -> left--; rail[1].broken = true }
#endif
  od
}

/* Puts and signals. */
proctype sender() {
  byte round = 1, step;
  do
  :: round > ROUNDS -> break
  :: d_step { round <= ROUNDS && step == 0 && !recovers && acknowledged == round - 1 ->
       post(helper, PART, round, 0); step = 1 }
  :: d_step { step == 1 && !recovers -> post(LAST_UP, PART, round, 1); step = 2 }
  :: d_step { step == 2 && !recovers && (BUG(1) || ((home == 0 || IS_QUIET(0)) && (home == 1 || IS_QUIET(1))
#if RAILS > 2
       && (home == 2 || IS_QUIET(2))
#endif
       )) -> post(home, SIGNAL, round, 0); step = 3 }
  :: d_step { step == 3 && !recovers && ALL_QUIET -> round++; step = 0 }
  od
}

/* The sender's side of the recovery and the return of rail r. */
proctype recover(byte r) {
  byte each;
end:
  do
  :: d_step { rail[r].stage == UP && rail[r].broken ->
       rail[r].failures++;
       note_failure(r, WAITING) }
  :: d_step { helper < RAILS && !rail[r].is_told &&
       (IS_RECOVERING(r) || (rail[r].failures > 0 && (rail[r].stage == DOWN || rail[r].stage == LEAVING))) ->
       post(helper, TELL, rail[r].failures, r);
       rail[r].is_told = true }
  :: d_step { rail[r].stage == WAITING && rail[r].is_told && IS_LAST_FAILED(r) &&
       (rail[r].answered == rail[r].failures || BUG(2)) ->
       if
       :: BUG(4)
       :: else -> rail[r].seen = word
       fi;
       rail[r].next = rail[r].done;
       each = rail[r].done;
       do
       :: each < rail[r].posted ->
            if
            :: rail[r].kind[each] == SIGNAL && rail[r].seen >= rail[r].value[each] && !BUG(3) -> rail[r].next = each + 1
            :: else
            fi;
            each++
       :: else -> break
       od;
       each = 0;
       enter(r, MOVING)
     }
  :: d_step { rail[r].stage == MOVING && (IS_LAST_FAILED(r) || BUG(8)) && rail[r].next < rail[r].posted ->
       if
       :: rail[r].kind[rail[r].next] == TEST || rail[r].kind[rail[r].next] == TELL
       :: else -> post(helper, rail[r].kind[rail[r].next], rail[r].value[rail[r].next], rail[r].part[rail[r].next])
       fi;
       rail[r].next++
     }
  :: d_step { rail[r].stage == MOVING && (IS_LAST_FAILED(r) || BUG(8)) && rail[r].next == rail[r].posted &&
       IS_QUIET(helper) -> enter(r, DOWN) }
#if RETURNS
  :: d_step { rail[r].stage == DOWN -> /* connect the queue pair again */
       rail[r].done = rail[r].posted;
       rail[r].executed = rail[r].posted;
       rail[r].broken = false;
       rail[r].own_life = rail[r].failures;
       enter(r, JOINING) }
  :: d_step { rail[r].stage == JOINING && rail[r].up == rail[r].failures -> post(r, TEST, 0, 0); enter(r, TRYING) }
  :: d_step { rail[r].stage == TRYING && rail[r].done == rail[r].posted && !recovers -> enter(r, UP) }
  :: d_step { rail[r].stage == TRYING && rail[r].broken -> rail[r].failures++; note_failure(r, LEAVING) }
  :: d_step { rail[r].stage == LEAVING && (rail[r].answered == rail[r].failures || BUG(6)) -> enter(r, DOWN) }
  :: d_step { rail[r].answered > rail[r].failures &&
       (rail[r].stage == UP || rail[r].stage == JOINING || rail[r].stage == TRYING) ->
       rail[r].failures = rail[r].answered;
       if
       :: rail[r].stage == UP -> note_failure(r, WAITING)
       :: else -> note_failure(r, LEAVING)
       fi }
#endif
  od
}

proctype receiver() {
  byte round = 1;
  do
  :: round > ROUNDS -> break
  :: atomic { round <= ROUNDS && word >= round ->
       assert(memory[0] == round && memory[1] == round) }
     acknowledged = round;
     round++
  od
}

/* The receiver's side of the recovery and the return of rail r; its own first request may fail once. */
proctype adapter(byte r) {
end:
  do
  :: d_step { rail[r].told > rail[r].answered && BUG(5) -> rail[r].answered = rail[r].told }
  :: d_step { rail[r].told > rail[r].answered && !rail[r].stopped -> rail[r].stopped = true }
  :: d_step { rail[r].told > rail[r].answered && rail[r].stopped -> rail[r].answered = rail[r].told }
#if RETURNS
  :: d_step { rail[r].stopped && (rail[r].answered == rail[r].told || BUG(6)) && rail[r].peer_life < rail[r].answered ->
       rail[r].peer_life = rail[r].answered; rail[r].stopped = false; rail[r].up = rail[r].answered }
  :: d_step { !tested && !rail[r].stopped && ANOTHER_WORKS(r) && rail[r].peer_life > 0 && IS_JOINED(r) &&
       rail[r].peer_life == rail[r].answered ->
       tested = true; rail[r].stopped = true; rail[r].answered++ }
#endif
  od
}

init {
  byte each;
  CHOOSE_BUG;
  if
  :: home_at_first = 0
  :: home_at_first = RAILS - 1
  fi;
  atomic {
    do
    :: each < RAILS -> rail[each].stage = UP; each++
    :: else -> break
    od;
    each = 0;
    enter(0, UP);
    do
    :: each < RAILS -> run execute(each); run recover(each); run adapter(each); each++
    :: else -> break
    od;
    run fail(); run sender(); run receiver()
  }
}
