/* Gets over the staged transport (proxy/engine/staged_transport.c): two sides put, get and signal, each in its own
 * order. The ring and its credits are verified in staged.pml; here a message takes room until the peer has placed it.
 *
 * A side's puts write the peer's memory, whose value is the number of puts that are placed there; its gets read it.
 *
 * Properties: a get reads all puts before it and none after it; a put or signal waits for the data of the gets before
 * it; no honest peer is refused; both sides finish.
 */
#include "bugs.pml"

#ifndef OPERATIONS
#define OPERATIONS 3 /* of one side */
#endif
#ifndef MORE
#define MORE OPERATIONS /* of the other, no less */
#endif
#ifndef ROOM
#define ROOM 1 /* messages */
#endif
#ifndef GETS
#define GETS 1
#endif
#define MADE (OPERATIONS + MORE) /* most messages of a side: of its operations, and answers */

mtype = { PUT, GET, SIGNAL, ANSWER };

typedef Side {
  mtype operation[MORE];
  byte next, puts;       /* operations, and puts among them, that were made into messages */
  mtype kind[MADE + 1];  /* of each message, from 1 */
  byte value[MADE + 1];  /* of a get and an answer: puts; of others: gets before it */
  byte made, taken, placed;
  byte memory;           /* the peer's puts that are placed here */
  byte asked, got;
  byte expected[MORE + 1]; /* of each get, from 1 */
  byte noted, answered;
  byte behind[MORE + 1]; /* of each request, from 1: its message */
};

Side side[2];

#define OPERATIONS_OF(s) (s == 0 -> OPERATIONS : MORE)
#define own side[s]
#define peer side[1 - s]
#define HAS_ROOM (own.made - peer.placed < ROOM)
#define NEXT own.operation[own.next]

proctype engine(bit s) {
  do
  :: d_step { own.next < OPERATIONS_OF(s) && HAS_ROOM &&
              (NEXT == GET -> own.asked - own.got < GETS || BUG(4) : own.asked == own.got || BUG(3)) -> /* make_next */
       own.made++;
       own.kind[own.made] = NEXT;
       own.value[own.made] = own.asked;
       if
       :: NEXT == GET -> own.asked++; own.expected[own.asked] = own.puts
       :: NEXT == PUT -> own.puts++
       :: else
       fi;
       own.next++
     }
  :: d_step { own.answered < own.noted && HAS_ROOM &&
              (own.behind[own.answered + 1] <= own.placed + BUG(1) || BUG(2)) -> /* make_answer */
       own.made++;
       own.kind[own.made] = ANSWER;
       own.value[own.made] = own.memory;
       own.answered++
     }
  :: d_step { own.taken < peer.made -> /* take */
       own.taken++;
       if
       :: peer.kind[own.taken] == GET ->
            assert(own.noted - own.answered < GETS); /* note_request refuses it otherwise */
            own.noted++;
            own.behind[own.noted] = own.taken
       :: else
       fi
     }
  :: d_step { own.placed < own.taken &&
              (!BUG(1) || peer.kind[own.placed + 1] != GET || own.answered > peer.value[own.placed + 1]) ->
       own.placed++; /* by the stream */
       if
       :: peer.kind[own.placed] == PUT -> own.memory++; assert(peer.got >= peer.value[own.placed])
       :: peer.kind[own.placed] == SIGNAL -> assert(peer.got >= peer.value[own.placed])
       :: peer.kind[own.placed] == ANSWER ->
            own.got++;
            assert(peer.value[own.placed] == own.expected[own.got])
       :: else
       fi
     }
  :: own.next == OPERATIONS_OF(s) && own.asked == own.got && own.answered == own.noted && own.made == peer.placed &&
     peer.next == OPERATIONS_OF(1 - s) && own.placed == peer.made && peer.answered == peer.noted ->
       break
  od
}

init {
  byte i, s;
  CHOOSE_BUG;
  do
  :: s < 2 && i < OPERATIONS_OF(s) ->
       if
       :: side[s].operation[i] = PUT
       :: side[s].operation[i] = GET
       :: side[s].operation[i] = SIGNAL
       fi;
       i++
  :: s < 2 && i == OPERATIONS_OF(s) -> i = 0; s++
  :: s == 2 -> break
  od;
  atomic { run engine(0); run engine(1) }
}
