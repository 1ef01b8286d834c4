package torture

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"sync"
	"time"
)

// A value says when and where a message was made: its era, the process, and a number within that. All messages of an era can
// be judged without the others, since the keys of an era are its own.
const (
	procBits = 14
	seqBits  = 28
)

func makeValue(era, proc, seq int64) int64 { return (era<<procBits|proc)<<seqBits | seq }

func eraOf(value int64) int { return int(value >> (procBits + seqBits)) }

// mix spreads the bits of a value, so that its low ones decide as well as any.
func mix(value int64) uint64 {
	x := uint64(value) + 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// keyOf is the key of the message with that value.
func keyOf(topic int, value int64) string {
	return fmt.Sprintf("%d-%d", eraOf(value), mix(value)%uint64(topics[topic].keys))
}

// The kinds of entries in a record.
const (
	entryStarted  = iota + 1 // about to produce
	entryCommit              // about to commit
	entryProduced            // stored, with ids
	entryFailed              // certainly not stored
	entryUnknown             // perhaps stored
	entryBegin               // handlings begin
	entryEnd                 // handlings ended
	entryEffect              // effects, as the database has them; not written by processes
	entryLedger              // what the ledger says; not written by processes
	entryDead                // dead letters; not written by processes
	entryGivenUp             // a handler said that messages are dead
	entryWithout             // handlings that had no lease, and were not begun
	lastEntry     = entryWithout
)

// entry is one act of a process upon messages of one topic, or of one group.
type entry struct {
	kind  int
	proc  int64 // of the consumer, in entryEffect; else of the file
	time  int64 // in microseconds since the base of the torture
	where int64 // topic or group
	own   bool  // of entryStarted: without the ledger
	items []item
}

// item is one message of an entry. What a kind has no use for is zero.
type item struct {
	value, id int64
	ok        bool
	attempt   int64
	lease     string
	wrongKey  string // of entryBegin, where it is not the one of the value
}

// encode writes an entry behind its length.
func (e *entry) encode(b []byte) []byte {
	begin := len(b)
	b = append(b, 0, 0, 0, 0)
	number := func(n int64) { b = binary.AppendVarint(b, n) }
	words := func(s string) {
		number(int64(len(s)))
		b = append(b, s...)
	}
	b = append(b, byte(e.kind))
	number(e.proc)
	number(e.time)
	number(e.where)
	if e.own {
		b = append(b, 1)
	} else {
		b = append(b, 0)
	}
	number(int64(len(e.items)))
	var before item
	for _, i := range e.items {
		number(i.value - before.value)
		number(i.id - before.id)
		flags := byte(0)
		if i.ok {
			flags |= 1
		}
		if i.lease != before.lease {
			flags |= 2
		}
		if i.wrongKey != "" {
			flags |= 4
		}
		if i.attempt != before.attempt {
			flags |= 8
		}
		b = append(b, flags)
		if flags&2 != 0 {
			words(i.lease)
		}
		if flags&4 != 0 {
			words(i.wrongKey)
		}
		if flags&8 != 0 {
			number(i.attempt)
		}
		before = i
	}
	binary.LittleEndian.PutUint32(b[begin:], uint32(len(b)-begin-4))
	return b
}

var errRecord = errors.New("a record cannot be read")

// decode reads what encode wrote, behind its length.
func (e *entry) decode(b []byte) (err error) {
	defer func() {
		if recover() != nil {
			err = errRecord
		}
	}()
	number := func() int64 {
		n, size := binary.Varint(b)
		if size <= 0 {
			panic(errRecord)
		}
		b = b[size:]
		return n
	}
	words := func() string {
		n := number()
		s := string(b[:n])
		b = b[n:]
		return s
	}
	e.kind = int(b[0])
	b = b[1:]
	if e.kind < 1 || e.kind > lastEntry {
		return errRecord
	}
	e.proc, e.time, e.where = number(), number(), number()
	e.own = b[0] == 1
	b = b[1:]
	n := int(number())
	e.items = slices.Grow(e.items[:0], n)
	var i item
	for range n {
		i.value += number()
		i.id += number()
		flags := b[0]
		b = b[1:]
		i.ok, i.wrongKey = flags&1 != 0, ""
		if flags&2 != 0 {
			i.lease = words()
		}
		if flags&4 != 0 {
			i.wrongKey = words()
		}
		if flags&8 != 0 {
			i.attempt = number()
		}
		e.items = append(e.items, i)
	}
	if len(b) > 0 {
		return errRecord
	}
	return nil
}

// clock counts microseconds since a base that all processes share. The wall clock is read once, so that a step of it reorders
// nothing.
type clock struct {
	offset int64
	start  time.Time
}

func newClock(base int64) clock {
	now := time.Now()
	return clock{now.UnixMicro() - base, now}
}

func (c clock) now() int64 { return max(1, c.offset+time.Since(c.start).Microseconds()) }

// recorder writes the record of a process. Each entry is in the file when add returns: what is on record survives the process.
type recorder struct {
	clock
	proc int64

	mu   sync.Mutex
	file *os.File
	b    []byte
	err  error
}

func newRecorder(path string, base, proc int64) (*recorder, error) {
	f, err := os.Create(path)
	return &recorder{clock: newClock(base), proc: proc, file: f}, err
}

// add writes an entry; without a time it is now.
func (r *recorder) add(e entry) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(e.items) == 0 || r.err != nil {
		return r.err
	}
	if e.proc == 0 {
		e.proc = r.proc
	}
	if e.time == 0 {
		e.time = r.now()
	}
	r.b = e.encode(r.b[:0])
	_, r.err = r.file.Write(r.b)
	return r.err
}

// readRecord hands over each entry of a file. What a process has not finished writing is left out. The entry is used again.
func readRecord(path string, each func(e *entry) error) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	in := bufio.NewReaderSize(f, 1<<18)
	var (
		head [4]byte
		b    []byte
		e    entry
	)
	for {
		if _, err := io.ReadFull(in, head[:]); err != nil {
			return unfinished(err)
		}
		n := int(binary.LittleEndian.Uint32(head[:]))
		b = slices.Grow(b[:0], n)[:n]
		if _, err := io.ReadFull(in, b); err != nil {
			return unfinished(err)
		}
		if err := e.decode(b); err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
		if err := each(&e); err != nil {
			return err
		}
	}
}

func unfinished(err error) error {
	if err == io.EOF || err == io.ErrUnexpectedEOF {
		return nil
	}
	return err
}
