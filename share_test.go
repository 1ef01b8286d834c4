package weir_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"testing"

	"github.com/weirhq/weir"
	"github.com/weirhq/weir/internal/pgtest"
)

// Calls at the same time share transactions; each gets the ids of its own messages, and is refused for its own faults alone.
func TestSharedProduces(t *testing.T) {
	t.Parallel()
	server := pgtest.New(t, &pgtest.Options{Fast: true})
	c, dsn := openOn(t, server, &weir.Options{NoListen: true, NoMaintenance: true})
	noError(t, c.CreateTopic(t.Context(), "t", nil))
	conn := connect(t, dsn)
	execute(t, conn, "begin")
	execute(t, conn, "lock table weir.log_1 in share mode") // the first call waits for it, and the others gather behind that
	const callers = 40
	var (
		all  sync.WaitGroup
		mu   sync.Mutex
		ids  = map[int64]string{}
		bad  int
		want = map[string]bool{}
	)
	for i := range callers {
		m := weir.Message{Key: fmt.Sprint(i), Payload: i}
		if i%10 == 3 {
			m.Payload = json.RawMessage(`{"broken`)
		} else {
			want[fmt.Sprint(i)] = true
		}
		all.Go(func() {
			produced, err := c.Produce(context.WithoutCancel(t.Context()), "t", m, weir.Message{Key: m.Key, Payload: "second"})
			mu.Lock()
			defer mu.Unlock()
			switch {
			case errors.Is(err, weir.ErrFormat):
				bad++
			case err != nil:
				t.Error(err)
			default:
				for _, p := range produced {
					ids[p.ID] = m.Key
				}
			}
		})
	}
	watch := connect(t, dsn)
	eventually(t, "a call waits for the lock", func() bool {
		return value[bool](t, watch, "select exists (select from pg_locks where not granted and relation = 'weir.log_1'::regclass)")
	})
	execute(t, conn, "rollback")
	all.Wait()
	if bad != callers/10 {
		t.Errorf("%d calls were refused, want %d", bad, callers/10)
	}
	if len(ids) != 2*len(want) {
		t.Errorf("%d ids, want %d", len(ids), 2*len(want))
	}
	for id, key := range ids {
		if got := value[string](t, watch, "select key from weir.log_1 where id = $1", id); got != key {
			t.Errorf("message %d has the key %s, its caller's was %s", id, got, key)
		}
	}
	if n := value[int](t, watch, "select count(*)::int from weir.log_1"); n != len(ids) {
		t.Errorf("%d messages are stored, want %d", n, len(ids))
	}
	// What was refused was sent again by itself: without it, it would be a few transactions.
	transactions := value[int](t, watch, "select count(distinct xmin::text)::int from weir.log_1")
	t.Logf("%d calls in %d transactions", len(want), transactions)

	execute(t, conn, "truncate weir.log_1")
	execute(t, conn, "begin")
	execute(t, conn, "lock table weir.log_1 in share mode")
	for i := range callers {
		all.Go(func() {
			if _, err := c.Produce(context.WithoutCancel(t.Context()), "t", weir.Message{Payload: i}); err != nil {
				t.Error(err)
			}
		})
	}
	eventually(t, "a call waits for the lock", func() bool {
		return value[bool](t, watch, "select exists (select from pg_locks where not granted and relation = 'weir.log_1'::regclass)")
	})
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(errors.New("enough"))
	if _, err := c.Produce(ctx, "t", weir.Message{Payload: "late"}); err == nil {
		t.Error("a call that had ended was stored")
	}
	execute(t, conn, "rollback")
	all.Wait()
	if n := value[int](t, watch, "select count(*)::int from weir.log_1"); n != callers {
		t.Errorf("%d messages are stored, want %d", n, callers)
	}
	if n := value[int](t, watch, "select count(distinct xmin::text)::int from weir.log_1"); n > callers/2 {
		t.Errorf("%d calls took %d transactions", callers, n)
	}
}
