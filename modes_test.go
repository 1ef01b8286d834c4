package weir_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/weirhq/weir"
)

// keyed gives messages with keys k0 to k<keys-1>, in turn; their values count from 0 within each key.
func keyed(keys, each int) []weir.Message {
	var list []weir.Message
	for n := range each {
		for k := range keys {
			list = append(list, weir.Message{Key: fmt.Sprintf("k%d", k), Payload: n})
		}
	}
	return list
}

// Key k, messages 0 to 4, of which 0 fails twice: handled 0, 1, 2, 3, 4. The other keys do not wait for it.
func TestOrderedRetries(t *testing.T) {
	t.Parallel()
	c, _ := open(t, nil)
	topicAndGroup(t, c, "t", "g", nil, &weir.GroupOptions{Mode: weir.Ordered, RetryDelay: 300 * time.Millisecond})
	_, err := c.Produce(t.Context(), "t", keyed(10, 5)...)
	noError(t, err)
	var (
		mu      sync.Mutex
		order   = map[string][]int{}
		running = map[string]bool{}
		all     []string
		tries   int
	)
	consume(t, c, "t", "g", weir.Handle(func(_ context.Context, m *weir.Received[int]) error {
		mu.Lock()
		if running[m.Key] {
			t.Errorf("two of key %s at once", m.Key)
		}
		running[m.Key] = true
		fail := m.Key == "k3" && m.Value == 0 && tries < 2
		if fail {
			tries++
			if m.Attempt != tries {
				t.Errorf("attempt is %d, want %d", m.Attempt, tries)
			}
		} else {
			order[m.Key] = append(order[m.Key], m.Value)
			all = append(all, m.Key)
		}
		mu.Unlock()
		time.Sleep(time.Millisecond)
		mu.Lock()
		running[m.Key] = false
		mu.Unlock()
		if fail {
			return errors.New("not now")
		}
		return nil
	}), &weir.ConsumerOptions{Concurrency: 8})
	drained(t, c, "t", "g")
	for k, values := range order {
		if !slices.Equal(values, []int{0, 1, 2, 3, 4}) {
			t.Errorf("key %s was handled in the order %v", k, values)
		}
	}
	if len(all) != 50 || tries != 2 {
		t.Errorf("%d handled after %d failures, want 50 after 2", len(all), tries)
	}
	if last := all[45:]; slices.ContainsFunc(last, func(k string) bool { return k != "k3" }) {
		t.Errorf("the last are of the keys %v: others waited for k3", last)
	}
}

// In a queue group the message of the highest priority comes first, and each has a lease of its own.
func TestQueueGroup(t *testing.T) {
	t.Parallel()
	c, dsn := open(t, nil)
	topicAndGroup(t, c, "t", "g", nil, &weir.GroupOptions{Mode: weir.Queue})
	conn := connect(t, dsn)
	for i := range 30 {
		execute(t, conn, "select weir.produce('t', $1::text::json, priority => $2)", fmt.Sprint(i), i%3)
	}
	var mu sync.Mutex
	var order []int
	consume(t, c, "t", "g", weir.Handle(func(_ context.Context, m *weir.Received[int]) error {
		mu.Lock()
		defer mu.Unlock()
		order = append(order, m.Value%3)
		return nil
	}), nil)
	drained(t, c, "t", "g")
	if len(order) != 30 || !slices.IsSortedFunc(order, func(a, b int) int { return b - a }) {
		t.Errorf("priorities came in the order %v", order)
	}
}

// The effect of a handler and its acknowledgement are one.
func TestHandleTx(t *testing.T) {
	t.Parallel()
	for _, mode := range []weir.Mode{weir.Stream, weir.Ordered, weir.Queue} {
		t.Run(string(mode), func(t *testing.T) {
			t.Parallel()
			c, dsn := open(t, nil)
			topicAndGroup(t, c, "t", "g", nil, &weir.GroupOptions{Mode: mode, RetryDelay: time.Millisecond})
			conn := connect(t, dsn)
			execute(t, conn, "create table effect (message bigint, attempt int)")
			ids := produced(t, c, "t", numbers(200)...)
			consume(t, c, "t", "g", weir.HandleTx(func(ctx context.Context, tx pgx.Tx, m *weir.Received[int]) error {
				_, err := tx.Exec(ctx, "insert into effect values ($1, $2)", m.ID, m.Attempt)
				if err == nil && m.Value%10 == 0 && m.Attempt < 3 {
					err = errors.New("not now")
				}
				return err
			}), &weir.ConsumerOptions{Concurrency: 4})
			drained(t, c, "t", "g")
			if n := value[int](t, conn, "select count(*)::int from effect"); n != len(ids) {
				t.Errorf("%d effects, want %d", n, len(ids))
			}
			if n := value[int](t, conn, "select count(distinct message)::int from effect"); n != len(ids) {
				t.Errorf("effects of %d messages, want %d", n, len(ids))
			}
		})
	}
}

// Groups of one name, of different topics, have nothing to do with each other, to weir check either, with which every test ends.
func TestCheckTellsTopicsApart(t *testing.T) {
	t.Parallel()
	c, dsn := open(t, nil)
	conn := connect(t, dsn)
	for _, topic := range []string{"one", "two"} {
		topicAndGroup(t, c, topic, "g", nil, &weir.GroupOptions{Mode: weir.Ordered})
		produced(t, c, topic, weir.Message{Key: "k", Payload: 1})
		claimOne(t, conn, topic, "g", "c", 10, "1 hour")
	}
}
