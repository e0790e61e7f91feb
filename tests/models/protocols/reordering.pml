/* Accesses that a processor performs in a different order than its program's, which Relacy does not execute.
 *
 * A thread is a set of accesses. Each is performed at once for all threads, as soon as its predecessors have been
 * performed: STEP names them, and a comment gives the reason. A wait is a load that finds the awaited value; if nothing
 * orders a later access after it, that may be performed first, as if the thread had guessed. One of these tests is
 * chosen:
 *
 * - ring: a trigger of two words, stored where room was found (pairing cached-tail)
 * - reuse: rows, a slab or a packet, read by a rank before their owner writes them again (pairings packet, rows-loaded
 *   and slab-read)
 * - rows: a program's rows, announced by a later kernel (pairing loadable-rows)
 * - cleared: a packet that is cleared before the peer sends the next one to its place
 * - calls: two ranks that look for each other's call after their own (calls.c)
 * - grant: a block that a reader copies while its owner revokes and overwrites it (pairing grant)
 * - counts: a granted block that its owner reuses once no transfer of the grant is active (pairings grant-start and
 *   grant-end)
 * - lease: a granted block whose lease ends while a reader copies it, and whose owner then grants another block by the
 *   same word (pairing lease)
 */
#include "bugs.pml"

#define STEP(done, first, access) :: d_step { !done && (first) -> done = true; access }

bool a1, a2, a3, b1, b2, b3, c1, c2; /* the accesses of threads a, b and c that were performed */

/* ring: the engine reads lap 1 of the only slot and gives it back; a producer fills it for lap 2. */
byte word0 = 1, word1 = 1, tail, tail_cache;

proctype engine() {
end:
  do
  STEP(a1, word1 == 1, skip)
  STEP(a2, a1, assert(word0 == 1)) /* acquire of word 1 */
  STEP(a3, a2, tail = 1)           /* release */
  :: a3 -> break
  od
}
proctype refresher() {
end:
  do
  STEP(c1, tail == 1, skip)
  STEP(c2, c1, tail_cache = 1) /* acquire of the tail, release */
  :: c2 -> break
  od
}
proctype producer() {
end:
  do
  STEP(b1, tail_cache == 1, skip)
  STEP(b2, b1 || BUG(1), word0 = 2) /* orderBeforeTrigger; else a branch alone */
  STEP(b3, b1 && b2, word1 = 2)     /* release */
  :: b1 && b2 && b3 -> break
  od
}

/* reuse: a rank loads data that its peer may overwrite after the flag. */
byte row, flag;

proctype reader() {
end:
  do
  STEP(a1, true, assert(row == 0))
  STEP(a2, a1 || BUG(2), flag = 1) /* a register has the value; else a copy by the asynchronous proxy */
  :: a1 && a2 -> break
  od
}
proctype owner() {
end:
  do
  STEP(b1, flag == 1, skip)
  STEP(b2, b1 || BUG(3), row = 1) /* acquire, or a branch that the processor honours; else neither */
  :: b1 && b2 -> break
  od
}

/* rows: the program's kernel stores, a later one raises the flag. */
proctype kernels() {
end:
  do
  STEP(a1, true, row = 1)
  STEP(a2, a1 || BUG(4), flag = 1) /* the first has ended; else programmatic dependent launch */
  :: a1 && a2 -> break
  od
}
proctype loader() {
end:
  do
  STEP(b1, flag == 1, skip)
  STEP(b2, b1, assert(row == 1)) /* acquire */
  :: b1 && b2 -> break
  od
}

/* cleared: a rank clears a place and sends another packet, after which the peer sends one to the place. */
byte place = 1, other;

proctype clearing() {
end:
  do
  STEP(a1, true, place = 0)
  STEP(a2, a1 || BUG(5), other = 2) /* the fence in clear() */
  :: a1 && a2 -> break
  od
}
proctype answering() {
end:
  do
  STEP(b1, other == 2, skip)
  STEP(b2, b1 || BUG(6), place = 3) /* the fence after the next epoch; else a branch alone */
  :: b1 && b2 -> break
  od
}

/* calls: each rank writes its entry and looks for the other's. */
byte entry[2], seen[2];

proctype caller(byte r) {
  bool wrote, looked;
  do
  STEP(wrote, true, entry[r] = 1)
  STEP(looked, wrote || BUG(7), seen[r] = entry[1 - r]) /* a full fence; a release and an acquire are none */
  :: wrote && looked -> break
  od
}

/* grant: a reader copies two words of a block and then looks at the block's number; the owner reuses the block. */
byte number = 1, block[2], copy[2], looked_at;

proctype copying() {
end:
  do
  STEP(a1, true, copy[0] = block[0])
  STEP(a2, true, copy[1] = block[1])
  STEP(a3, (a1 && a2) || BUG(8), looked_at = number) /* acquire fence */
  :: a1 && a2 && a3 -> break
  od
}
proctype reusing() {
end:
  do
  STEP(b1, true, number = 0)
  STEP(b2, b1 || BUG(9), block[0] = 1) /* the fence after the word */
  STEP(b3, b1 || BUG(9), block[1] = 1)
  :: b1 && b2 && b3 -> break
  od
}

/* counts: a transfer is counted, and reads or writes the block unless the block is revoked; the owner revokes the block,
 * and reuses it when no transfer is counted, or the process of the transfer has ended, as the kernel's lock shows. */
byte counted, revoked, starts, reused;
bool ended;

proctype transferring() {
end:
  do
  STEP(a1, true, counted = 1)
  STEP(a2, a1 || BUG(10), starts = !revoked) /* grant-start: a full fence */
  STEP(a3, a2 || BUG(14), assert((a2 && !starts) || !reused)) /* a branch, which no write precedes */
  STEP(c1, a2 && (a3 || BUG(11)), counted = 0) /* grant-end: release */
  :: !ended -> ended = true; /* killed: the kernel unlocks after the last access of the process */
    if
    :: BUG(13) /* else a device goes on */
    :: else -> break
    fi
  :: a1 && a2 && a3 && c1 -> break
  od
}
proctype waiting() {
end:
  do
  STEP(b1, true, revoked = 1)
  STEP(b2, (b1 || BUG(12)) && (counted == 0 || ended), skip) /* grant-start: a full fence */
  STEP(b3, b1 && b2, reused = 1)
  :: b1 && b2 && b3 -> break
  od
}

/* lease: a reader copies a block, and then looks at the end of the lease, the clock and the block's number. The owner
 * revokes the grant, and makes a grant without a lease whose number and end are in the same words. */
byte lease = 1, granted = 1; /* the grant whose end, and whose number, the words contain */
bool expired, copied_late, found_late;

proctype leased() {
end:
  do
  STEP(a1, true, copied_late = expired)
  STEP(a2, a1 || BUG(15), found_late = expired && lease == 1) /* acquire fence */
  STEP(a3, (a1 && a2) || BUG(16), looked_at = granted)        /* acquire fence */
  :: a1 && a2 && a3 -> break
  od
}
proctype granting() {
end:
  do
  STEP(b1, true, granted = 0)
  STEP(b2, b1 || BUG(17), lease = 2) /* the fence after the word */
  STEP(b3, b1 && b2, granted = 2)    /* release */
  :: b1 && b2 && b3 -> break
  od
}
proctype clock() { expired = true }

init {
  CHOOSE_BUG;
  if
  :: atomic { run engine(); run refresher(); run producer() }
  :: atomic { run reader(); run owner() }
  :: atomic { run kernels(); run loader() }
  :: atomic { run clearing(); run answering() };
     _nr_pr == 1 -> assert(place == 3)
  :: atomic { run caller(0); run caller(1) };
     _nr_pr == 1 -> assert(seen[0] || seen[1])
  :: atomic { run copying(); run reusing() };
     _nr_pr == 1 -> assert(looked_at == 0 || (copy[0] == 0 && copy[1] == 0))
  :: atomic { run transferring(); run waiting() }
  :: atomic { run leased(); run granting(); run clock() };
     _nr_pr == 1 -> assert(looked_at != 1 || found_late || !copied_late)
  fi
}
