package weir_test

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/weirhq/weir"
	"github.com/weirhq/weir/internal/pgtest"
)

// An install of the first version, with messages in it, is upgraded while it is in use: what was there stays, and the log goes on
// over the end of its segments.
func TestUpgradeFromVersion1(t *testing.T) {
	t.Parallel()
	dsn := pgtest.Shared(t).Database(t)
	conn := connect(t, dsn)
	text, err := os.ReadFile("testdata/version_1.sql")
	noError(t, err)
	script := func(sql string) {
		t.Helper()
		if _, err := conn.PgConn().Exec(t.Context(), sql).ReadAll(); err != nil {
			t.Fatalf("%.100s: %v", sql, err)
		}
	}
	script("set check_function_bodies = off; " + string(text))
	long := strings.Repeat("k", 2000) // nothing limited it
	script(`
		select weir.create_topic('t', '{"segment_size": 1000}');
		select weir.create_topic('u', '{"segment_size": 1000, "format": "jsonb"}');
		select weir.create_topic('v', '{"segment_size": 1000, "format": "bytes"}');
		select weir.create_group('t', 'g');
		select weir.produce_many('t', array_fill('1'::json, array[2500]));
		select weir.produce('t', '"long"', '` + long + `');
		select weir.produce('u', '1');
		select weir.produce_bytes('v', '1');
		select * from weir.claim('t', 'g', 'c', 10);
		select weir.fail(1, 'c', 5, 'broken');
		select weir.release(1, 'c');`)

	// A transaction of before holds the log; the upgrade waits for it.
	tx := start(t, connect(t, dsn))
	execute(t, tx, "select weir.produce('t', '\"before\"')")
	upgraded := make(chan error, 1)
	c, err := weir.New(newPool(t, dsn, nil), &weir.Options{NoListen: true, Logger: newTestLog(t).Logger})
	noError(t, err)
	t.Cleanup(c.Close)
	go func() { upgraded <- c.Migrate(t.Context()) }()
	eventually(t, "the upgrade waits", func() bool {
		return value[int](t, conn, "select count(*)::int from pg_locks where not granted and locktype = 'relation' and database = (select oid from pg_database where datname = current_database())") == 1
	})
	noError(t, tx.Commit(t.Context()))
	noError(t, <-upgraded)

	for _, name := range []string{"produce", "produce_bytes", "produce_many", "produce_many_bytes"} {
		if n := value[int](t, conn, "select count(*)::int from pg_proc where pronamespace = 'weir'::regnamespace and proname = $1", name); n != 1 {
			t.Errorf("there are %d functions weir.%s, a call could mean any of them", n, name)
		}
	}
	if n := value[int](t, conn, "select count(*)::int from pg_proc where pronamespace = 'weir'::regnamespace and proname = 'produce_many_sql'"); n != 0 {
		t.Error("weir.produce_many_sql is left")
	}

	// As the programs of before call it, and with all there is now, over the ends of several segments.
	var ids []int64
	ids = append(ids, column[int64](t, conn, "select id from weir.produce_many('t', array_fill('2'::json, array[900]), null, null) as p (id)")...)
	for range 3 {
		messages := make([]weir.Message, 900)
		for i := range messages {
			messages[i] = weir.Message{Payload: 3, Priority: 1, IdempotencyKey: fmt.Sprint(len(ids), " ", i)}
		}
		results, err := c.Produce(t.Context(), "t", messages...)
		noError(t, err)
		ids = append(ids, idsOf(results)...)
	}
	n, err := c.Copy(t.Context(), "t", sequence([]weir.Message{{Payload: 4, Timeout: 1e9}, {Payload: 4}}))
	if err != nil || n != 2 {
		t.Errorf("copied %d, %v", n, err)
	}
	if !slices.IsSorted(ids) || ids[len(ids)-1]-ids[0] < 3500 {
		t.Errorf("ids are %d to %d", ids[0], ids[len(ids)-1])
	}
	got := stored(t, c, "t")
	if len(got) != 2502+len(ids)+2 || got[2500].Key != long {
		t.Errorf("%d are stored, want %d", len(got), 2502+len(ids)+2)
	}
	for _, topic := range []string{"u", "v"} {
		for range 3 {
			_, err := c.Copy(t.Context(), topic, sequence(slices.Repeat([]weir.Message{{Payload: []byte("5"), Priority: 2}}, 900)))
			noError(t, err)
		}
		if n := len(stored(t, c, topic)); n != 2701 {
			t.Errorf("%s: %d are stored, want 2701", topic, n)
		}
	}

	// Every log and every segment is as a new one: columns, constraints, defaults.
	noError(t, c.CreateTopic(t.Context(), "new", &weir.TopicOptions{SegmentSize: 1000}))
	shape := func(table string) string {
		return value[string](t, conn, `
			select concat_ws(' ',
				(
					select string_agg(attname || ' ' || format_type(atttypid, atttypmod) || ' ' || attnotnull, ', ' order by attnum)
					from pg_attribute where attrelid = $1::text::regclass and attnum > 0 and not attisdropped
				),
				(
					select string_agg(conname || ' ' || regexp_replace(pg_get_constraintdef(oid), ' NOT VALID$', ''), ', ' order by conname)
					from pg_constraint where conrelid = $1::text::regclass and contype = 'c'
				))`, table)
	}
	want := shape("weir.log_4")
	for _, table := range column[string](t, conn, `
		select c.oid::regclass::text from pg_class as c
		where c.relnamespace = 'weir'::regnamespace and c.relkind in ('r', 'p') and c.relname ~ '^log_[14](_\d+)?$'`) {
		if got := shape(table); got != want {
			t.Errorf("%s is\n%s\nnew ones are\n%s", table, got, want)
		}
	}
	refusedWith(t, conn, "insert into weir.log_1_1 (key, payload) values ('"+long+"', '1')", "23514", "log_key")
	if _, err := conn.Exec(t.Context(), "select weir.drop_topic('t', force => true)"); err != nil {
		t.Error(err)
	}
	if _, err := conn.Exec(t.Context(), "select weir.produce('t', '1')"); err == nil {
		t.Error("the topic is there still")
	}
}
