/* A connection over two rails (proxy/engine/rails_transport.c), of which one may fail. In each round the sender puts two
 * parts, one on each rail, and then signals on the home rail; the receiver reads both parts and answers by another
 * connection. A rail executes its requests in order. After a failure the sender gets no more completions of the rail,
 * but the receiver's adapter may still execute requests of the rail until the receiver stops its queue pair.
 *
 * Properties: a signal shows both parts of its round; no part is stored after its round was signalled and so may be read;
 * no signal is stored twice; all rounds end.
 */
#include "bugs.pml"

#ifndef ROUNDS
#define ROUNDS 2
#endif
#define MADE (6 * ROUNDS) /* most requests of a rail */
#define NONE 2

mtype = { PART, SIGNAL };

typedef Rail {
  mtype kind[MADE];
  byte value[MADE], part[MADE];
  byte posted, executed, done;
};

Rail rail[2];
byte home, failed = NONE;
bool one_up;                /* the sender has moved everything to the other rail */
bool told, stopped, answered; /* of the failed rail: the receiver is told, has stopped its queue pair, has answered */
byte memory[2], word, acknowledged;

#define USABLE (failed == NONE || one_up)
#define RAIL_OF(p) (one_up -> 1 - failed : p)
#define IS_QUIET(r) (one_up && r == failed || rail[r].done == rail[r].posted)

inline post(on, what, number, half) {
  rail[on].kind[rail[on].posted] = what;
  rail[on].value[rail[on].posted] = number;
  rail[on].part[rail[on].posted] = half;
  rail[on].posted++
}

proctype execute(byte r) {
end:
  do
  :: d_step { rail[r].executed < rail[r].posted && !(stopped && r == failed) ->
       if
       :: rail[r].kind[rail[r].executed] == SIGNAL ->
            assert(rail[r].value[rail[r].executed] == word + 1);
            word = rail[r].value[rail[r].executed]
       :: else ->
            assert(rail[r].value[rail[r].executed] > word);
            memory[rail[r].part[rail[r].executed]] = rail[r].value[rail[r].executed]
       fi;
       rail[r].executed++
     }
  :: d_step { rail[r].done < rail[r].executed && r != failed -> rail[r].done++ }
  od
}

proctype fail() {
  if
  :: failed = 0
  :: failed = 1
  :: skip
  fi
}

proctype sender() {
  byte round = 1, step, stage, seen, next;
  do
  :: round > ROUNDS -> break
  :: d_step { round <= ROUNDS && step == 0 && USABLE && acknowledged == round - 1 ->
       post(RAIL_OF(0), PART, round, 0); step = 1 }
  :: d_step { step == 1 && USABLE -> post(RAIL_OF(1), PART, round, 1); step = 2 }
  :: d_step { step == 2 && USABLE && (IS_QUIET(1 - home) || BUG(1)) -> post(home, SIGNAL, round, 0); step = 3 }
  :: d_step { step == 3 && USABLE && IS_QUIET(0) && IS_QUIET(1) -> round++; step = 0 }
  :: d_step { failed != NONE && stage == 0 -> told = true; seen = word; stage = 1 }
  :: d_step { stage == 1 && (answered || BUG(2)) ->
       if
       :: BUG(4)
       :: else -> seen = word
       fi;
       next = rail[failed].done;
       stage = next;
       do
       :: next < rail[failed].posted ->
            if
            :: rail[failed].kind[next] == SIGNAL && seen >= rail[failed].value[next] && !BUG(3) -> stage = next + 1
            :: else
            fi;
            next++
       :: else -> break
       od;
       next = stage;
       do
       :: next < rail[failed].posted ->
            post(1 - failed, rail[failed].kind[next], rail[failed].value[next], rail[failed].part[next]);
            next++
       :: else -> break
       od;
       stage = 2;
       home = 1 - failed;
       one_up = true
     }
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

proctype adapter() { /* the receiver's side of a recovery */
end:
  do
  :: d_step { told && !answered && BUG(5) -> answered = true }
  :: d_step { told && !stopped -> stopped = true }
  :: d_step { stopped && !answered -> answered = true }
  od
}

init {
  CHOOSE_BUG;
  if
  :: home = 0
  :: home = 1
  fi;
  atomic { run execute(0); run execute(1); run fail(); run sender(); run receiver(); run adapter() }
}
