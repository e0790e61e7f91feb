/* The credits of the staged transport (proxy/engine/staged_transport.c): two sides, each with a ring to send from and
 * one to receive in. Sizes and positions are in units of PROXYCCL_STAGED_ALIGN bytes; a header has one.
 *
 * Streams and the wire complete their work at any time, each in order. The wire reads a message's place until its
 * requests are complete, because it may have to send again. It may write a word in two pieces, the low part first, as a
 * stream socket does; between the two it writes nothing else there. Words have two parts here, LOW the lower.
 *
 * Properties: no place is written before its message is sent and placed; each side finds every message in order, where
 * it looks for it; no honest peer is refused; both sides finish.
 */
#include "constants.h"
#include "bugs.pml"

#ifndef RING
#define RING 3 /* units */
#endif
#ifndef MESSAGES
#define MESSAGES PROXYCCL_STAGED_MESSAGES
#endif
#ifndef PUTS
#define PUTS 2 /* of one side */
#endif
#ifndef REPLIES
#define REPLIES PUTS /* of the other, no more */
#endif
#define MADE (2 * PUTS) /* most messages: one may fill the rest of the ring before each put */
#define WIRE 2          /* requests that the wire has room for */
#define LOW 2           /* values of the lower part of a word */

typedef Side {
  bool data[PUTS];                     /* whether a put has a unit of data, or is only a signal */
  byte puts;                           /* that were made into messages */
  byte head, next, tail;               /* positions up to which messages are made, posted, freed */
  byte made, copied, posted, sent, freed;
  byte delivered;                      /* messages that the wire has written */
  byte start[MADE + 1], size[MADE + 1] /* of each message, from 1 */
  byte sending[RING], receiving[RING]; /* the message that a unit belongs to; 0: none yet */
  byte arrived, credited;              /* the words that the peer writes */
  byte rest_arrived, rest_credited;    /* what the wire has yet to add to them */
  byte seen_arrived, seen_credited;    /* the highest that was read of each */
  byte received, taken, placed, returned;
};

Side side[2];

mtype = { MESSAGE, CREDIT };
chan wire[2] = [WIRE] of { mtype, byte };

#define PUTS_OF(s) (s == 0 -> PUTS : REPLIES)
#define own side[s]
#define peer side[1 - s]
#define WIRE_HAS_ROOM (len(wire[s]) < WIRE)

/* A put whose data would begin at the ring's end waits for a message without data, which fills the rest. */
#define FILLS (own.data[own.puts] && own.head % RING == RING - 1)
#define SIZE (1 + (own.data[own.puts] && !FILLS))
/* Writes a word, in one piece or only its lower part. */
#define WRITE(word, rest, value)                                                   \
  if                                                                               \
  :: rest = 0; word = value                                                        \
  :: word / LOW != value / LOW ->                                                  \
       rest = (value / LOW - word / LOW) * LOW; word = word - word % LOW + value % LOW \
  fi
#define WIRE_FREE (peer.rest_arrived == 0 && peer.rest_credited == 0)

/* Reads a word: a value that is lower than one before is half written. */
#define READ(word, seen)                        \
  if                                            \
  :: word > seen || BUG(8) -> seen = word       \
  :: else                                       \
  fi
#define HAS_ROOM (own.made - own.freed != MESSAGES && own.head + SIZE - own.tail <= RING + BUG(1))

proctype engine(bit s) {
  byte number, unit, count;
  do
  :: d_step { own.puts < PUTS_OF(s) && HAS_ROOM -> /* open_message */
       number = own.made + 1;
       own.start[number] = own.head;
       own.size[number] = SIZE;
       unit = 0;
       do
       :: unit < own.size[number] ->
            assert(own.sending[(own.head + unit) % RING] <= own.sent);
            own.sending[(own.head + unit) % RING] = number;
            unit++
       :: else -> break
       od;
       own.puts = own.puts + !FILLS;
       own.head = own.head + own.size[number];
       own.made = number;
       number = 0; unit = 0
     }
  :: d_step { own.copied < own.made -> own.copied++ } /* by the stream */
  :: d_step { (own.posted < own.copied || (BUG(2) && own.posted < own.made)) && WIRE_HAS_ROOM -> /* post */
       assert(own.posted < own.copied);
       own.posted++;
       assert(own.next == own.start[own.posted]);
       own.next = own.next + own.size[own.posted];
       wire[s]!MESSAGE(own.posted)
     }
  :: atomic { WIRE_FREE && wire[s]?[MESSAGE, number] -> /* by the wire: the message, then the count of messages */
       wire[s]?MESSAGE(number);
       unit = 0;
       do
       :: unit < own.size[number] ->
            assert(own.sending[(own.start[number] + unit) % RING] == number);
            assert(peer.receiving[(own.start[number] + unit) % RING] <= peer.placed);
            peer.receiving[(own.start[number] + unit) % RING] = number;
            unit++
       :: else -> break
       od;
       own.delivered = number;
       WRITE(peer.arrived, peer.rest_arrived, number);
       number = 0; unit = 0
     }
  :: atomic { WIRE_FREE && wire[s]?[CREDIT, count] ->
       wire[s]?CREDIT(count);
       WRITE(peer.credited, peer.rest_credited, count);
       count = 0
     }
  :: d_step { !WIRE_FREE -> /* the rest of a word */
       peer.arrived = peer.arrived + peer.rest_arrived;
       peer.credited = peer.credited + peer.rest_credited;
       peer.rest_arrived = 0; peer.rest_credited = 0
     }
  :: d_step { own.sent < own.delivered ->
       assert(own.sending[own.start[own.sent + 1] % RING] == own.sent + 1);
       own.sent++
     }
  :: d_step { own.credited != own.seen_credited -> /* reclaim: looks */
       READ(own.credited, own.seen_credited);
       assert(own.seen_credited >= own.freed && own.seen_credited <= own.posted) /* the peer is not refused */
     }
  :: d_step { own.freed < own.seen_credited && (own.freed < own.sent || BUG(3)) -> /* reclaim */
       own.freed++;
       own.tail = own.tail + own.size[own.freed]
     }
  :: d_step { own.arrived != own.seen_arrived -> /* take: looks */
       READ(own.arrived, own.seen_arrived);
       assert(own.seen_arrived >= own.taken && own.seen_arrived - own.returned <= MESSAGES - BUG(4)) /* likewise */
     }
  :: d_step { own.taken < own.seen_arrived -> /* take */
       assert(own.receiving[own.received % RING] == own.taken + 1);
       own.taken++;
       own.received = own.received + peer.size[own.taken]
     }
  :: d_step { own.placed < own.taken -> /* by the stream */
       number = own.placed + 1;
       unit = 0;
       do
       :: unit < peer.size[number] ->
            assert(own.receiving[(peer.start[number] + unit) % RING] == number);
            unit++
       :: else -> break
       od;
       own.placed = number;
       number = 0; unit = 0
     }
  :: d_step { own.returned != own.placed && WIRE_HAS_ROOM &&
              (!BUG(5) || own.puts == PUTS_OF(s) || HAS_ROOM) -> /* return_credits */
       own.returned = own.placed;
       wire[s]!CREDIT(own.placed)
     }
  :: d_step { BUG(6) && own.returned != own.taken && WIRE_HAS_ROOM ->
       own.returned = own.taken;
       wire[s]!CREDIT(own.taken)
     }
  :: d_step { BUG(7) && own.placed == own.arrived && own.returned == own.placed && own.placed < peer.made &&
              WIRE_HAS_ROOM ->
       own.returned = own.placed + 1;
       wire[s]!CREDIT(own.placed + 1)
     }
  :: own.puts == PUTS_OF(s) && own.made == own.freed && peer.puts == PUTS_OF(1 - s) && own.returned == peer.made && len(wire[s]) == 0 && WIRE_FREE ->
       break
  od
}

init {
  byte i;
  CHOOSE_BUG;
  do
  :: i < PUTS + REPLIES ->
       if
       :: i < PUTS -> side[0].data[i] = true
       :: i >= PUTS -> side[1].data[i - PUTS] = true
       :: true
       fi;
       i++
  :: else -> break
  od;
  atomic { run engine(0); run engine(1) }
}
