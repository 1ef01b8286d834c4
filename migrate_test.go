package weir_test

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/weirhq/weir"
	"github.com/weirhq/weir/internal/pgtest"
)

// Many clients install the same schema at once, and then make the same topic and group at once: there is one of each.
func TestManyAtOnce(t *testing.T) {
	t.Parallel()
	dsn := pgtest.Shared(t).Database(t)
	const n = 32
	clients := make([]*weir.Client, n)
	for i := range clients {
		pool := newPool(t, dsn, func(config *pgxpool.Config) { config.MaxConns = 1 })
		c, err := weir.New(pool, &weir.Options{Logger: newTestLog(t).Logger, NoListen: true})
		noError(t, err)
		t.Cleanup(c.Close)
		noError(t, pool.Ping(t.Context()))
		clients[i] = c
	}
	all := func(what string, f func(c *weir.Client) error) {
		t.Helper()
		began := time.Now()
		gate := make(chan struct{})
		var work sync.WaitGroup
		for i, c := range clients {
			work.Go(func() {
				<-gate
				if err := f(c); err != nil {
					t.Errorf("%s, client %d: %v", what, i, err)
				}
			})
		}
		close(gate)
		work.Wait()
		t.Logf("%s: %d clients took %v", what, n, time.Since(began).Round(time.Millisecond))
	}
	ctx := t.Context()
	all("migrate", func(c *weir.Client) error { return c.Migrate(ctx) })
	all("topic", func(c *weir.Client) error { return c.CreateTopic(ctx, "t", nil) })
	all("group", func(c *weir.Client) error { return c.CreateGroup(ctx, "t", "g", nil) })
	all("all three", func(c *weir.Client) error {
		if err := c.Migrate(ctx); err != nil {
			return err
		}
		if err := c.CreateTopic(ctx, "u", nil); err != nil {
			return err
		}
		return c.CreateGroup(ctx, "u", "g", nil)
	})
	conn := connect(t, dsn)
	for query, want := range map[string]int{
		"select count(*)::int from weir.meta":                                                            1,
		"select count(*)::int from weir.topic":                                                           2,
		"select count(*)::int from weir.consumer_group":                                                  2,
		"select count(*)::int from weir.cursor":                                                          2,
		"select count(*)::int from pg_class where relkind = 'p' and relnamespace = 'weir'::regnamespace": 2,
		"select count(*)::int from pg_class where relkind = 'S' and relnamespace = 'weir'::regnamespace and relname ~ '^log_[0-9]+_id$'": 2,
	} {
		if got := value[int](t, conn, query); got != want {
			t.Errorf("%s gives %d, want %d", query, got, want)
		}
	}
	produced(t, clients[0], "t", numbers(3)...)
	handled := newTally()
	consume(t, clients[1], "t", "g", handleInto(handled), nil)
	eventually(t, "it works", func() bool { return handled.distinct() == 3 })
}

func TestMigrateAgainChangesNothing(t *testing.T) {
	t.Parallel()
	c, dsn := open(t, nil)
	topicAndGroup(t, c, "t", "g", nil, nil)
	produced(t, c, "t", numbers(3)...)
	conn := connect(t, dsn)
	state := func() string {
		return value[string](t, conn, `
			select md5(string_agg(x, ',' order by x)) from (
				select oid::text || ':' || xmin::text from pg_class where relnamespace = 'weir'::regnamespace and relkind in ('r', 'p', 'v')
				union all select oid::text || ':' || xmin::text from pg_proc where pronamespace = 'weir'::regnamespace
				union all select changed_at::text from weir.meta
			) as o (x)`)
	}
	before := state()
	noError(t, c.Migrate(t.Context()))
	noError(t, openDSN(t, dsn, nil).Migrate(t.Context()))
	if after := state(); after != before {
		t.Error("a second migration changed the install")
	}
	// Functions of another build are replaced; topics, messages and groups stay.
	execute(t, conn, "update weir.meta set functions = 'another build'")
	noError(t, c.Migrate(t.Context()))
	if after := state(); after == before {
		t.Error("the functions of another build were not replaced")
	}
	if got := stored(t, c, "t"); len(got) != 3 {
		t.Errorf("%d messages are left, want 3", len(got))
	}
}

func TestSchemaVersions(t *testing.T) {
	t.Parallel()
	c, dsn := open(t, nil)
	noError(t, c.CreateTopic(t.Context(), "t", nil))
	conn := connect(t, dsn)
	type meta struct {
		Version, Compatible int
		Functions           string
	}
	rows, err := conn.Query(t.Context(), "select version, compatible, functions from weir.meta")
	noError(t, err)
	now, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByPos[meta])
	noError(t, err)
	set := func(m meta) {
		t.Helper()
		execute(t, conn, "update weir.meta set version = $1, compatible = $2, functions = $3", m.Version, m.Compatible, m.Functions)
	}
	t.Cleanup(func() {
		_, err := conn.Exec(context.Background(), "update weir.meta set version = $1, compatible = $2, functions = $3", now.Version, now.Compatible, now.Functions)
		if err != nil {
			t.Error(err)
		}
	})
	// What a client that has not checked yet says, however it is asked.
	refused := func(sentinel error, parts ...string) {
		t.Helper()
		_, err := weir.Open(t.Context(), dsn, nil)
		wantError(t, err, sentinel, parts...)
		fresh := func() *weir.Client {
			c, err := weir.New(newPool(t, dsn, nil), &weir.Options{Logger: newTestLog(t).Logger, NoListen: true})
			noError(t, err)
			return c
		}
		_, err = fresh().Produce(t.Context(), "t", numbers(1)...)
		wantError(t, err, sentinel, parts...)
		_, err = fresh().Copy(t.Context(), "t", sequence(numbers(1)))
		wantError(t, err, sentinel, parts...)
		for _, p := range producers {
			if p.tx {
				wantError(t, p.run(t, fresh(), dsn, "t", true, numbers(1)...), sentinel, parts...)
			}
		}
		k, err := fresh().NewConsumer("t", "g", handleInto(newTally()), nil)
		noError(t, err)
		wantError(t, k.Run(t.Context()), sentinel, parts...)
		_, err = fresh().Check(t.Context())
		wantError(t, err, sentinel, parts...)
	}
	set(meta{0, 1, now.Functions})
	refused(weir.ErrSchemaMissing)
	// Newer, and no library of this age can work with it.
	set(meta{now.Version + 5, now.Version + 3, "x"})
	refused(weir.ErrSchemaNew, "weir", fmt.Sprint(now.Version+5), fmt.Sprint(now.Version+3), "upgrade")
	wantError(t, c.Migrate(t.Context()), weir.ErrSchemaNew)
	// Newer, and compatible: it works, and is not taken back.
	set(meta{now.Version + 5, now.Version, "x"})
	newer, err := weir.Open(t.Context(), dsn, &weir.Options{Migrate: true})
	noError(t, err)
	produced(t, newer, "t", numbers(1)...)
	newer.Close()
	if v := value[int](t, conn, "select version from weir.meta"); v != now.Version+5 {
		t.Errorf("the newer schema was taken back to version %d", v)
	}
	if now.Version > 1 {
		set(meta{now.Version - 1, 1, "x"})
		refused(weir.ErrSchemaOld, "weir", fmt.Sprint(now.Version-1), fmt.Sprint(now.Version), "weir migrate")
	}
}

func TestSchemaMissing(t *testing.T) {
	t.Parallel()
	dsn := pgtest.Shared(t).Database(t)
	_, err := weir.Open(t.Context(), dsn, nil)
	wantError(t, err, weir.ErrSchemaMissing, "weir migrate", `"weir"`)
	openDSN(t, dsn, nil)
	_, err = weir.Open(t.Context(), dsn, &weir.Options{Schema: "elsewhere"})
	wantError(t, err, weir.ErrSchemaMissing, `"elsewhere"`)
	_, err = weir.Open(t.Context(), dsn+"x", nil)
	if err == nil || weir.CanRetry(nil) {
		t.Errorf("a database that does not exist: %v", err)
	}
	// A client whose schema is dropped says so.
	conn := connect(t, dsn)
	other := openDSN(t, dsn, &weir.Options{Schema: "other"})
	topicAndGroup(t, other, "t", "g", nil, nil)
	execute(t, conn, "drop schema other cascade")
	_, err = other.Produce(t.Context(), "t", numbers(1)...)
	wantError(t, err, weir.ErrSchemaMissing)
	k, err := other.NewConsumer("t", "g", handleInto(newTally()), nil)
	noError(t, err)
	wantError(t, k.Run(t.Context()), weir.ErrSchemaMissing)
}

// Two installs in one database know nothing of each other.
func TestTwoInstalls(t *testing.T) {
	t.Parallel()
	dsn := pgtest.Shared(t).Database(t)
	names := []string{"first_1", "_2"}
	var clients []*weir.Client
	for _, name := range names {
		c := openDSN(t, dsn, &weir.Options{Schema: name})
		topicAndGroup(t, c, "t", "g", nil, &weir.GroupOptions{MaxAttempts: 1})
		clients = append(clients, c)
	}
	tallies := []*tally{newTally(), newTally()}
	consumers := make([]*consumption, len(clients))
	for i, c := range clients {
		consumers[i] = consume(t, c, "t", "g", weir.Handle(func(_ context.Context, m *weir.Received[string]) error {
			if !strings.HasPrefix(m.Value, names[i]) {
				t.Errorf("%s got %q", names[i], m.Value)
			}
			tallies[i].add(m.ID)
			return nil
		}), nil)
	}
	for i, c := range clients {
		for range 20 {
			produced(t, c, "t", weir.Message{Payload: names[i]})
		}
		_, err := c.Copy(t.Context(), "t", sequence([]weir.Message{{Payload: names[i] + " copied"}}))
		noError(t, err)
	}
	for i, c := range clients {
		eventually(t, names[i]+" is handled", func() bool { return tallies[i].distinct() == 21 })
		drained(t, c, "t", "g")
	}
	conn := connect(t, dsn)
	if n := value[int](t, conn, "select count(*) from pg_namespace where nspname = 'weir'"); n != 0 {
		t.Error("there is a schema weir, which nobody asked for")
	}
	// Nothing of one refers to the other, by name or by dependency.
	for i, name := range names {
		rows := value[int](t, conn, "select count(*) from pg_proc where pronamespace = $1::text::regnamespace and strpos(prosrc, $2 || '.') > 0", name, names[1-i])
		if rows != 0 {
			t.Errorf("%d functions of %s name %s", rows, name, names[1-i])
		}
	}
	consumers[0].stop() // one that polls now would end with an error
	execute(t, conn, "drop schema "+names[0]+" cascade")
	produced(t, clients[1], "t", weir.Message{Payload: names[1]})
	eventually(t, "the second goes on without the first", func() bool { return tallies[1].distinct() == 22 })
}

// Migrate waits for whoever holds a lock, for a short time at a time, and gives up with its context.
func TestMigrateWaits(t *testing.T) {
	t.Parallel()
	dsn := pgtest.Shared(t).Database(t)
	conn, watch := connect(t, dsn), connect(t, dsn)
	tx := start(t, conn)
	execute(t, tx, "select pg_advisory_xact_lock(hashtextextended('weir.migrate', 0))")
	pool := newPool(t, dsn, func(config *pgxpool.Config) { config.ConnConfig.RuntimeParams["application_name"] = "migrating" })
	c, err := weir.New(pool, &weir.Options{NoListen: true})
	noError(t, err)
	defer c.Close()
	waits := func() {
		t.Helper()
		eventually(t, "it waits", func() bool {
			return value[int](t, watch, "select count(*) from pg_stat_activity where application_name = 'migrating' and datname = current_database() and wait_event_type = 'Lock'") == 1
		})
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- c.Migrate(ctx) }()
	waits()
	cancel()
	if err := <-ended; err == nil {
		t.Error("a cancelled migration succeeded")
	}
	go func() { ended <- c.Migrate(t.Context()) }()
	waits()
	noError(t, tx.Rollback(t.Context()))
	noError(t, <-ended)
	noError(t, c.CreateTopic(t.Context(), "t", nil))
}

// An upgrade makes functions and views anew. Roles keep what they were granted on them, by name, and get what took its place.
func TestMigrateKeepsGrants(t *testing.T) {
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
	suffix := value[string](t, conn, "select substr(md5(current_database()), 1, 12)")
	// The names need quotes.
	producer, consumer, reader, owner := "Producer "+suffix, "consumer-"+suffix, "reader "+suffix, "kept "+suffix
	roles := []string{producer, consumer, reader, owner}
	for _, r := range roles {
		execute(t, conn, `create role "`+r+`" login`)
		dropRoleAfter(t, dsn, `"`+r+`"`)
		execute(t, conn, `grant usage on schema weir to "`+r+`"`)
	}
	script(`
		select weir.create_topic('t');
		select weir.create_group('t', 'g');
		grant execute on function weir.produce, weir.produce_many, weir.version, weir.topic_info to "` + producer + `";
		grant insert (key, headers, payload) on weir.log_1 to "` + producer + `";
		grant execute on function weir.poll, weir.ack, weir.fail, weir.fetch, weir.extend_many, weir.release, weir.group_named, weir.version
			to "` + consumer + `";
		grant select on weir.groups to "` + reader + `";
		grant select (topic, dead) on weir.groups to "` + consumer + `";
		grant execute on function weir.finished, weir.head, weir.drawn, weir.produced_after to "` + reader + `";
		grant execute on function weir.drop_topic(text) to "` + owner + `" with grant option;
		set role "` + owner + `";
		grant execute on function weir.drop_topic(text) to "` + reader + `";
		reset role`)

	c := openDSN(t, dsn, nil)
	as := func(role string) *pgx.Conn {
		config, err := pgx.ParseConfig(dsn)
		noError(t, err)
		config.User = role
		conn, err := pgx.ConnectConfig(t.Context(), config)
		noError(t, err)
		t.Cleanup(func() { _ = conn.Close(context.Background()) })
		return conn
	}
	execute(t, as(producer), "select weir.produce('t', '1')")
	execute(t, as(producer), "select * from weir.produce_many('t', array['1']::json[])")
	execute(t, as(reader), "select * from weir.groups")
	execute(t, as(consumer), "select topic, dead from weir.groups where false")
	refusedWith(t, as(consumer), "select topic, lag from weir.groups where false", "42501")
	refusedWith(t, as(consumer), "select weir.produce('t', '1')", "42501")
	refusedWith(t, as(producer), "select * from weir.groups", "42501")

	// Their programs go on with this library.
	client := func(role string) *weir.Client {
		pool := newPool(t, dsn, func(config *pgxpool.Config) { config.ConnConfig.User = role })
		c, err := weir.New(pool, &weir.Options{Logger: newTestLog(t).Logger, NoMaintenance: true})
		noError(t, err)
		t.Cleanup(c.Close)
		return c
	}
	produced(t, client(producer), "t", numbers(3)...)
	handled := newTally()
	consume(t, client(consumer), "t", "g", handleInto(handled), nil)
	eventually(t, "all is handled", func() bool { return handled.distinct() == 5 })
	drained(t, c, "t", "g")

	rights := func() []string {
		return column[string](t, conn, `
			select x from (
				select p.proname || ' ' || r.rolname || case when a.is_grantable then ' and may grant it' else '' end
				from pg_proc as p cross join lateral aclexplode(p.proacl) as a join pg_roles as r on r.oid = a.grantee
				where p.pronamespace = 'weir'::regnamespace and r.rolname = any ($1)
				union all
				select c.relname || ' ' || r.rolname
				from pg_class as c cross join lateral aclexplode(c.relacl) as a join pg_roles as r on r.oid = a.grantee
				where c.relnamespace = 'weir'::regnamespace and r.rolname = any ($1)
			) as o (x) order by x collate "C"`, roles)
	}
	var want []string // drawn and count_deliveries are what the view weir.groups calls now
	for role, names := range map[string]string{
		producer: "close_batch produce produce_batch produce_many record_batch topic_info version",
		consumer: "ack ack_messages claimed consumer_gone consumer_here count_deliveries drawn extend_many fail fail_many fetch fetch_many group_named maintain poll release version",
		reader:   "count_deliveries drawn drop_topic finished groups head produced_after",
	} {
		for name := range strings.FieldsSeq(names) {
			want = append(want, name+" "+role)
		}
	}
	want = append(want, "drop_topic "+owner+" and may grant it")
	slices.Sort(want)
	if got := rights(); !slices.Equal(got, want) {
		t.Errorf("the roles have\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}

	// What was taken from a role is not given back by the next upgrade, though it was given by this one.
	execute(t, conn, `revoke execute on function weir.maintain from "`+consumer+`"`)
	execute(t, conn, "update weir.meta set functions = 'another build'")
	noError(t, c.Migrate(t.Context()))
	want = slices.DeleteFunc(want, func(right string) bool { return right == "maintain "+consumer })
	if got := rights(); !slices.Equal(got, want) {
		t.Errorf("after another upgrade the roles have\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}
