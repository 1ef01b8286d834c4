package weir_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/weirhq/weir"
	"github.com/weirhq/weir/internal/pgtest"
)

// TestBlockers: what holds up a topic is named, open or prepared, in the view and in a consumer's warning; what does not is
// not.
func TestBlockers(t *testing.T) {
	s := pgtest.New(t, &pgtest.Options{Fast: true})
	log := newTestLog(t)
	c, dsn := openOn(t, s, &weir.Options{Logger: log.Logger})
	topicAndGroup(t, c, "t", "g", nil, nil)
	ctx := t.Context()

	list, err := c.Blockers(ctx, "")
	noError(t, err)
	if len(list) != 0 {
		t.Fatalf("an idle install has blockers: %+v", list)
	}

	unrelated := connect(t, dsn)
	execute(t, unrelated, "begin")
	execute(t, unrelated, "select pg_current_xact_id()")
	open := connect(t, dsn)
	execute(t, open, "set application_name = 'slow importer'")
	execute(t, open, "begin")
	execute(t, open, "select weir.produce('t', '1')")
	prepared := connect(t, dsn)
	execute(t, prepared, "begin")
	execute(t, prepared, "select weir.produce('t', '1')")
	execute(t, prepared, "prepare transaction 'half done'")

	list, err = c.Blockers(ctx, "t")
	noError(t, err)
	if len(list) != 0 {
		t.Fatalf("nothing waits, and yet there are blockers: %+v", list)
	}
	produced(t, c, "t", weir.Message{Payload: 1}, weir.Message{Payload: 2})
	// As polls do, which hold the same lock, for the length of their transactions: one that finds nothing, one that writes.
	polling, writing := connect(t, dsn), connect(t, dsn)
	for _, poll := range []*pgx.Conn{polling, writing} {
		execute(t, poll, "begin")
		execute(t, poll, "select pg_sequence_last_value('weir.log_1_id'::regclass)")
	}
	execute(t, writing, "update weir.cursor set claimed = claimed")

	list, err = c.Blockers(ctx, "t")
	noError(t, err)
	var byPID, byGID *weir.Blocker
	for i := range list {
		if list[i].PID == int32(open.PgConn().PID()) {
			byPID = &list[i]
		}
		if list[i].GID == "half done" {
			byGID = &list[i]
		}
	}
	if len(list) != 2 || byPID == nil || byGID == nil {
		t.Fatalf("want the open producer and the prepared one, got %+v", list)
	}
	if byPID.State != "idle in transaction" || byPID.Application != "slow importer" || !strings.Contains(byPID.Query, "weir.produce") ||
		byPID.Age <= 0 || byPID.Waiting != 4 {
		t.Errorf("the open producer is described as %+v", *byPID)
	}
	execute(t, polling, "rollback")
	execute(t, writing, "rollback")
	if byGID.State != "prepared" || byGID.PID != 0 || byGID.Age <= 0 {
		t.Errorf("the prepared producer is described as %+v", *byGID)
	}

	r := consume(t, c, "t", "g", weir.Handle(func(_ context.Context, m *weir.Received[int]) error { return nil }),
		&weir.ConsumerOptions{BlockedAfter: 50 * time.Millisecond, PollInterval: 20 * time.Millisecond})
	eventually(t, "the consumer warns of both", func() bool {
		text := log.String()
		return strings.Contains(text, "slow importer") && strings.Contains(text, "half done")
	})
	execute(t, open, "commit")
	execute(t, prepared, "commit prepared 'half done'")
	eventually(t, "everything is handled", func() bool { return group(t, c, "t", "g").Lag == 0 })
	r.stop()
	execute(t, unrelated, "rollback")

	list, err = c.Blockers(ctx, "")
	noError(t, err)
	if len(list) != 0 {
		t.Errorf("all have finished, and yet there are blockers: %+v", list)
	}
}
