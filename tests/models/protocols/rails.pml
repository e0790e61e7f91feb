/* A connection over two rails (proxy/engine/rails_transport.c), which may fail and are used again. In each round the
 * sender puts two parts, one on each rail, and then signals on the home rail; the receiver reads both parts and answers by
 * another connection. A rail executes its requests in order. Only one rail fails at a time. After a failure the sender gets no more completions of the
 * rail, but the receiver's adapter may still execute requests of the rail until the receiver stops its queue pair.
 *
 * After a failure both ranks connect their queue pairs of the rail again. If the two queue pairs were connected after
 * different failures, a request may be acknowledged although it is not executed, because its packet looks like a repeated
 * one. The first request on the rail tests the rail, and may fail too.
 *
 * Properties: a signal shows both parts of its round; no part is stored after its round was signalled and so may be read;
 * no signal is stored twice; all rounds end.
 */
#include "bugs.pml"

#ifndef ROUNDS
#define ROUNDS 2
#endif
#ifndef FAILURES
#define FAILURES 1
#endif
#define MADE (3 * ROUNDS + 4 * (FAILURES + 1)) /* most requests of a rail */
#define NONE 2

mtype = { PART, SIGNAL, TEST };
mtype = { BOTH_UP, WAITING, ONE_UP, JOINING, TRYING, LEAVING }; /* stages */

typedef Rail {
  mtype kind[MADE];
  byte value[MADE], part[MADE];
  byte posted, executed, done;
};

Rail rail[2];
byte home, home_at_first;
byte broken = NONE;           /* the rail that gives the sender no completions */
byte failed = NONE;           /* the rail that the sender knows to have failed, or that failed last */
mtype stage = BOTH_UP;        /* of the sender */
byte failures;                /* known to the sender */
byte told, answered;          /* the words `down` at the receiver and at the sender */
byte up;                      /* the word `up` at the sender */
byte own_life, peer_life;     /* the failures after which the two queue pairs of the rail were connected */
bool stopped;                 /* the receiver's queue pair of the failed rail is in its error state */
byte memory[2], word, acknowledged;

#define USABLE (stage != WAITING)
#define RAIL_OF(p) (stage == BOTH_UP -> p : 1 - failed)
#define IS_QUIET(r) ((stage != BOTH_UP && r == failed) || rail[r].done == rail[r].posted)
#define IS_JOINED(r) (r != failed || own_life == peer_life)

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
       :: !IS_JOINED(r) || rail[r].kind[rail[r].executed] == TEST -> skip
       :: IS_JOINED(r) && rail[r].kind[rail[r].executed] == SIGNAL ->
            assert(rail[r].value[rail[r].executed] == word + 1);
            word = rail[r].value[rail[r].executed]
       :: IS_JOINED(r) && rail[r].kind[rail[r].executed] == PART ->
            assert(rail[r].value[rail[r].executed] > word);
            memory[rail[r].part[rail[r].executed]] = rail[r].value[rail[r].executed]
       fi;
       rail[r].executed++
     }
  :: d_step { rail[r].done < rail[r].executed && r != broken && !(stage == WAITING && r == failed) -> rail[r].done++ }
  od
}

proctype fail() {
  byte left = FAILURES;
end:
  do
  :: d_step { left > 0 && stage == BOTH_UP && broken == NONE && answered == failures -> left--; broken = 0 }
  :: d_step { left > 0 && stage == BOTH_UP && broken == NONE && answered == failures -> left--; broken = 1 }
  :: d_step { left > 0 && stage == TRYING && broken == NONE -> left--; broken = failed }
  od
}

proctype sender() {
  byte round = 1, step, seen, next, first;
  do
  :: round > ROUNDS -> break
  :: d_step { round <= ROUNDS && step == 0 && USABLE && acknowledged == round - 1 ->
       post(RAIL_OF(0), PART, round, 0); step = 1 }
  :: d_step { step == 1 && USABLE -> post(RAIL_OF(1), PART, round, 1); step = 2 }
  :: d_step { step == 2 && USABLE && (IS_QUIET(1 - home) || BUG(1)) -> post(home, SIGNAL, round, 0); step = 3 }
  :: d_step { step == 3 && USABLE && IS_QUIET(0) && IS_QUIET(1) -> round++; step = 0 }
  :: d_step { stage == BOTH_UP && broken != NONE ->
       failed = broken; failures++; told = failures; seen = word; stage = WAITING }
  :: d_step { stage == WAITING && (answered == failures || BUG(2)) ->
       if
       :: BUG(4)
       :: else -> seen = word
       fi;
       next = rail[failed].done;
       first = next;
       do
       :: next < rail[failed].posted ->
            if
            :: rail[failed].kind[next] == SIGNAL && seen >= rail[failed].value[next] && !BUG(3) -> first = next + 1
            :: else
            fi;
            next++
       :: else -> break
       od;
       next = first;
       do
       :: next < rail[failed].posted ->
            if
            :: rail[failed].kind[next] == TEST
            :: else -> post(1 - failed, rail[failed].kind[next], rail[failed].value[next], rail[failed].part[next])
            fi;
            next++
       :: else -> break
       od;
       home = 1 - failed;
       stage = ONE_UP
     }
  :: d_step { stage == ONE_UP -> /* connect the queue pair again, and tell the receiver */
       rail[failed].done = rail[failed].posted;
       rail[failed].executed = rail[failed].posted;
       broken = NONE; own_life = failures; stage = JOINING }
  :: d_step { stage == JOINING && up == failures -> post(failed, TEST, 0, 0); stage = TRYING }
  :: d_step { stage == TRYING && rail[failed].done == rail[failed].posted ->
       home = home_at_first; stage = BOTH_UP }
  :: d_step { stage == TRYING && broken != NONE -> failures++; told = failures; stage = LEAVING }
  :: d_step { stage == LEAVING && (answered == failures || BUG(6)) -> stage = ONE_UP }
  :: d_step { answered > failures && (stage == BOTH_UP || stage == JOINING || stage == TRYING) ->
       if
       :: stage == BOTH_UP -> stage = WAITING
       :: else -> stage = LEAVING
       fi;
       failures = answered; told = failures; seen = word }
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

proctype adapter() { /* the receiver's side of a recovery and a return; its own first request may fail once */
  bool tested;
end:
  do
  :: d_step { told > answered && BUG(5) -> answered = told }
  :: d_step { told > answered && !stopped -> stopped = true }
  :: d_step { told > answered && stopped -> answered = told }
  :: d_step { stopped && (answered == told || BUG(6)) && peer_life < answered ->
       peer_life = answered; stopped = false; up = answered }
  :: d_step { !tested && !stopped && broken != 1 - failed && peer_life > 0 && own_life == peer_life && peer_life == answered ->
       tested = true; stopped = true; answered++ }
  od
}

init {
  CHOOSE_BUG;
  if
  :: home_at_first = 0
  :: home_at_first = 1
  fi;
  home = home_at_first;
  atomic { run execute(0); run execute(1); run fail(); run sender(); run receiver(); run adapter() }
}
