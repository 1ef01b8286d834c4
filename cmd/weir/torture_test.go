package main

import (
	"bytes"
	"io"
	"net"
	"net/url"
	"regexp"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/weirhq/weir/internal/pgtest"
)

// TestTortureRefusals: what is refused is refused with exit code 2, and before anything is touched.
func TestTortureRefusals(t *testing.T) {
	c := newCLI(t)
	c.ok("", "topic", "create", "orders")
	c.ok("{}", "produce", "orders")
	before := c.fingerprint()
	torture := func(patterns []string, args ...string) {
		t.Helper()
		c.fails(exitUsage, "", append([]string{"torture", "--for", "1s"}, args...), patterns...)
	}

	torture([]string{"no fault \"flood\"", "the kinds are .*postmaster"}, "--faults", "postmaster,flood")
	torture([]string{"no bug \"nothing\"", "raw-head"}, "--break", "nothing", "--dsn", "")
	torture([]string{"private server only"}, "--break", "raw-head")
	torture([]string{"at least 1s"}, "--for", "10ms")
	torture([]string{"at least 1s"}, "--for", "0s")
	torture([]string{"the rate is -1"}, "--rate", "-1")
	torture([]string{"--rate is 0"}, "--rate", "0")
	torture([]string{"--faults is empty"}, "--faults", "")
	torture([]string{"--break is empty"}, "--break", "")
	torture([]string{"dsn"}, "--dsn", "postgres://%zz")

	// A server that nobody listens for.
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	closed := l.Addr().String()
	_ = l.Close()
	torture([]string{"cannot be reached"}, "--dsn", "postgres://nobody@"+closed+"/nothing?sslmode=disable")

	// What needs a private server.
	torture([]string{"topic \"orders\"", "--yes"})
	torture([]string{"postmaster", "private server"}, "--yes", "--faults", "postmaster")
	torture([]string{"disk-data", "private server"}, "--yes", "--faults", "disk-data")

	torture([]string{"too old", "PostgreSQL 13"}, "--yes", "--dsn", older(t, c.dsn))
	if after := c.fingerprint(); after != before {
		t.Errorf("something was touched:\nbefore %s\nafter  %s", before, after)
	}

	// Nobody's topics, but somebody is there.
	c.ok("", "topic", "drop", "orders", "--force", "--yes")
	conn, err := pgx.Connect(t.Context(), c.dsn)
	if err != nil {
		t.Fatal(err)
	}
	before = c.fingerprint()
	torture([]string{"in use by 1 other session", "--yes"})
	if _, err := conn.Exec(t.Context(), "create schema weir_torture"); err != nil {
		t.Fatal(err)
	}
	torture([]string{"schema weir_torture", "dropped"}, "--yes")
	if _, err := conn.Exec(t.Context(), "drop schema weir_torture"); err != nil {
		t.Fatal(err)
	}
	if after := c.fingerprint(); after != before {
		t.Errorf("something was touched:\nbefore %s\nafter  %s", before, after)
	}
	if err := conn.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	c.ok("", "check")

	// Not Weir's.
	empty := &cli{t: t, dsn: pgtest.Shared(t).Database(t)}
	before = empty.fingerprint()
	empty.fails(exitUsage, "", []string{"torture", "--for", "1s"}, "--yes", "installs")
	if after := empty.fingerprint(); after != before {
		t.Errorf("something was touched:\nbefore %s\nafter  %s", before, after)
	}
}

// TestTortureOfADatabase: on a database of somebody's, what a torture made is gone afterwards.
func TestTortureOfADatabase(t *testing.T) {
	c := &cli{t: t, dsn: pgtest.Shared(t).Database(t)} // not beside others: it takes the whole machine
	c.ok("", "migrate")
	c.ok("", "topic", "create", "orders")
	c.ok("{}", "produce", "orders")
	folder := t.TempDir()
	out := c.ok("", "torture", "--yes", "--for", "3s", "--rate", "200", "--report", folder, "--output", "json")
	reports := c.objects(out)
	if len(reports) != 1 || reports[0]["ok"] != true || reports[0]["messages"].(float64) == 0 || reports[0]["unavailable"].(map[string]any)["postmaster"] == nil {
		t.Errorf("%s", out)
	}
	if names := c.query("select string_agg(topic, ',') from weir.topics"); names != "orders" {
		t.Errorf("topics: %s", names)
	}
	if left := c.query("select count(*)::text from pg_namespace where nspname = 'weir_torture'"); left != "0" {
		t.Error("the schema weir_torture is still there")
	}
	if left := c.query("select count(*)::text from pg_trigger where tgname like 'weir_torture%'"); left != "0" {
		t.Error("triggers are still there")
	}
}

// fingerprint is all that a torture could have changed: relations, functions, topics and groups, the rows of a log, and settings.
func (c *cli) fingerprint() string {
	c.t.Helper()
	return c.query(`
		select md5(string_agg(x, E'\n' order by x)) from (
			select oid || relname || coalesce(relacl::text, '') from pg_class
			union all select oid || proname || coalesce(prosrc, '') from pg_proc
			union all select oid || tgname from pg_trigger
			union all select oid || nspname from pg_namespace
			union all select setrole || setconfig::text from pg_db_role_setting
			union all select gid::text from pg_prepared_xacts where database = current_database()
		) as all_of_it (x)`)
}

func (c *cli) query(sql string) (text string) {
	c.t.Helper()
	conn, err := pgx.Connect(c.t.Context(), c.dsn)
	if err == nil {
		err = conn.QueryRow(c.t.Context(), sql).Scan(&text)
		_ = conn.Close(c.t.Context())
	}
	if err != nil {
		c.t.Fatal(err)
	}
	return text
}

// older is a server that says that it is PostgreSQL 13, before the one of the DSN.
func older(t *testing.T, dsn string) string {
	t.Helper()
	config, err := pgx.ParseConfig(dsn)
	if err != nil {
		t.Fatal(err)
	}
	network, address := pgconn.NetworkAddress(config.Host, config.Port)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	says := regexp.MustCompile(`server_version\x00\d\d`)
	go func() {
		for {
			client, err := l.Accept()
			if err != nil {
				return
			}
			server, err := net.Dial(network, address)
			if err != nil {
				_ = client.Close()
				return
			}
			go func() {
				_, _ = io.Copy(server, client)
				_ = server.Close()
			}()
			go func() {
				defer client.Close()
				// What a server says of itself comes before anything else, in one piece.
				var said bytes.Buffer
				b := make([]byte, 1<<16)
				for !says.Match(said.Bytes()) {
					n, err := server.Read(b)
					if err != nil {
						return
					}
					said.Write(b[:n])
				}
				if _, err := client.Write(says.ReplaceAll(said.Bytes(), []byte("server_version\x0013"))); err == nil {
					_, _ = io.Copy(client, server)
				}
			}()
		}
	}()
	u := url.URL{Scheme: "postgres", User: url.User(config.User), Host: l.Addr().String(), Path: config.Database, RawQuery: "sslmode=disable"}
	return u.String()
}
