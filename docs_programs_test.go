package weir_test

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/weirhq/weir"
	"github.com/weirhq/weir/internal/pgtest"
)

// language is one that docs/sql.md has programs in.
type language struct {
	// name is that of its blocks, suffix that of its files.
	name, suffix string
	// need gives the command that runs a file and what its environment needs, or says what is missing and how it is installed.
	need func(t *testing.T) (run string, env []string, missing string)
}

var languages = []language{
	{"sh", ".sh", func(t *testing.T) (string, []string, string) {
		folder := pgtest.Shared(t).Binaries().Dir
		if _, err := os.Stat(filepath.Join(folder, "psql")); err != nil {
			return "", nil, "psql is missing: apt-get install postgresql-client"
		}
		return "sh", []string{"PATH=" + folder + string(os.PathListSeparator) + os.Getenv("PATH")}, ""
	}},
	{"python", ".py", func(*testing.T) (string, []string, string) {
		// What apt-get installs, the distribution's own python3 finds.
		for _, run := range []string{"python3", "/usr/bin/python3"} {
			if exec.Command(run, "-c", "import psycopg").Run() == nil {
				return run, nil, ""
			}
		}
		return "", nil, "Python 3 with psycopg 3 is missing: apt-get install python3-psycopg (Debian), or pip install 'psycopg[binary]'"
	}},
	{"js", ".js", func(*testing.T) (string, []string, string) {
		// Where npm install --global pg puts it, and apt-get install node-pg.
		folders := []string{os.Getenv("NODE_PATH"), "/usr/share/nodejs"}
		if root, err := exec.Command("npm", "root", "--global").Output(); err == nil {
			folders = append(folders, strings.TrimSpace(string(root)))
		}
		path := "NODE_PATH=" + strings.Join(folders, string(os.PathListSeparator))
		look := exec.Command("node", "-e", "require('pg')")
		look.Env = append(os.Environ(), path)
		if look.Run() != nil {
			return "", nil, "Node with pg is missing: npm install --global pg, or apt-get install nodejs node-pg (Debian)"
		}
		return "node", []string{path}, ""
	}},
}

// programs writes the programs of a language that a document has into a folder, each under the name that its first line says.
func programs(t *testing.T, document string, l language) (folder string) {
	t.Helper()
	folder = t.TempDir()
	names := regexp.MustCompile(`^(?:#|//) (\w+\` + l.suffix + `)\n`)
	_, blocks := readDocument(t, document)
	for _, b := range blocks {
		if b.language != l.name {
			continue
		}
		name := names.FindStringSubmatch(b.text)
		if name == nil {
			t.Fatalf("%s:%d: the first line does not name the program", document, b.line)
		}
		noError(t, os.WriteFile(filepath.Join(folder, name[1]), []byte(b.text), 0o644))
	}
	return folder
}

// TestSQLDocumentPrograms runs the producer and the consumer of each language that docs/sql.md has. One of the messages cannot be
// handled, and is dead after two attempts.
func TestSQLDocumentPrograms(t *testing.T) {
	t.Parallel()
	for _, l := range languages {
		t.Run(l.name, func(t *testing.T) {
			t.Parallel()
			run, env, missing := l.need(t)
			if missing != "" {
				t.Skip(missing)
			}
			folder := programs(t, "docs/sql.md", l)
			c, dsn := open(t, nil)
			topicAndGroup(t, c, "sales", "clerk", nil, &weir.GroupOptions{MaxAttempts: 2, RetryDelay: -1})
			database := value[string](t, connect(t, dsn), "select current_database()::text")
			var printed, complaints bytes.Buffer
			program := func(name, input string) *exec.Cmd {
				cmd := exec.Command(run, filepath.Join(folder, name+l.suffix))
				// Of libpq's variables only those of this server.
				cmd.Env = slices.DeleteFunc(os.Environ(), func(v string) bool { return strings.HasPrefix(v, "PG") })
				cmd.Env = append(cmd.Env, slices.DeleteFunc(pgtest.Shared(t).Command("psql").Env, func(v string) bool { return !strings.HasPrefix(v, "PG") })...)
				cmd.Env = append(append(cmd.Env, env...), "PGDATABASE="+database)
				cmd.Stdin = strings.NewReader(input)
				cmd.Stdout, cmd.Stderr = &printed, &complaints
				cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // what a shell has begun ends with it
				cmd.WaitDelay = 10 * time.Second
				return cmd
			}

			const input = `{"customer": "ada", "cents": 1250}
{"customer": "bob", "note": "back\\slash, \"quote\" | bar"}
{"customer": "zoë", "cents": 7}
`
			if err := program("produce", input).Run(); err != nil {
				t.Fatalf("produce%s: %v\n%s", l.suffix, err, complaints.String())
			}
			if n := value[int](t, connect(t, dsn), "select count(*)::int from weir.log_1 where key = payload ->> 'customer'"); n != 3 {
				t.Errorf("produce%s stored %d messages with their keys, want 3", l.suffix, n)
			}
			printed.Reset()
			consumer := program("consume", "")
			noError(t, consumer.Start())
			ended := make(chan error, 1)
			go func() { ended <- consumer.Wait() }()
			end := func() {
				_ = syscall.Kill(-consumer.Process.Pid, syscall.SIGKILL)
				<-ended
			}
			t.Cleanup(func() {
				if end != nil {
					end()
				}
			})
			eventually(t, "the messages are handled, or dead", func() bool {
				select {
				case err := <-ended:
					end = nil
					t.Fatalf("consume%s ended: %v\n%s", l.suffix, err, complaints.String())
				default:
				}
				g := group(t, c, "sales", "clerk")
				return g.Lag == 0 && g.Leases == 0 && g.Retrying == 0 && g.Dead == 1
			})
			end()
			end = nil
			out := printed.String()
			for _, word := range []string{"ada", "1250", "zoë", "7"} {
				if strings.Count(out, word) != 1 {
					t.Errorf("consume%s printed %q: %q is not there once", l.suffix, out, word)
				}
			}
			dead, err := c.DeadLetters(t.Context(), "sales", "clerk", 0, 10)
			noError(t, err)
			if len(dead) != 1 || dead[0].Key != "bob" || dead[0].Attempt != 2 || !strings.Contains(dead[0].Error, "cents") {
				t.Errorf("the dead letters are %+v", dead)
			}
			if complaints.Len() > 0 {
				t.Errorf("it complained:\n%s", complaints.String())
			}
		})
	}
}

// runStatements runs the blocks of SQL of a document in a database.
func runStatements(t *testing.T, document, dsn string) {
	t.Helper()
	_, blocks := readDocument(t, document)
	ran := 0
	for _, b := range blocks {
		if b.language != "sql" {
			continue
		}
		ran++
		cmd := pgtest.Shared(t).Command("psql", "-X", "-q", "-v", "ON_ERROR_STOP=1", dsn)
		cmd.Stdin = strings.NewReader(b.text)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%s:%d: %v\n%s", document, b.line, err, out)
		}
	}
	if ran == 0 {
		t.Errorf("%s has no statements", document)
	}
}

// TestOperationsDocument: the statements of docs/operations.md run, and the roles that it makes can do what they are for, and nothing
// else.
func TestOperationsDocument(t *testing.T) {
	_, dsn := open(t, nil)
	admin := connect(t, dsn)
	t.Cleanup(func() {
		// Roles belong to the server, and what they were granted to the database.
		const roles = "weir_producer, weir_consumer, weir_operator"
		conn, err := pgx.Connect(context.Background(), dsn)
		noError(t, err)
		defer func() { _ = conn.Close(context.Background()) }()
		_, err = conn.Exec(context.Background(), "drop owned by "+roles+"; drop role "+roles)
		noError(t, err)
	})
	runStatements(t, "docs/operations.md", dsn)
	as := func(role string) *weir.Client {
		pool := newPool(t, dsn, func(config *pgxpool.Config) { config.ConnConfig.RuntimeParams["role"] = role })
		c, err := weir.New(pool, &weir.Options{Logger: newTestLog(t).Logger})
		noError(t, err)
		t.Cleanup(c.Close)
		return c
	}
	ctx := t.Context()
	producer, consumer, operator := as("weir_producer"), as("weir_consumer"), as("weir_operator")

	topicAndGroup(t, operator, "t", "g", nil, &weir.GroupOptions{MaxAttempts: 1})
	topicAndGroup(t, operator, "compacted", "g", &weir.TopicOptions{Compact: true}, &weir.GroupOptions{Mode: weir.Ordered})
	produced(t, producer, "t", numbers(9)...)
	_, err := producer.Copy(ctx, "t", sequence(numbers(1)))
	noError(t, err)
	execute(t, admin, "grant insert (key, headers, payload) on weir.log_1 to weir_producer; grant usage on sequence weir.log_1_id to weir_producer")
	_, err = as("weir_producer").Copy(ctx, "t", sequence(numbers(1)))
	noError(t, err)
	produced(t, producer, "compacted", weir.Message{Key: "k", Payload: 1})
	execute(t, admin, "create table effect (id bigint); grant insert on effect to weir_consumer")
	for _, topic := range []string{"t", "compacted"} {
		consume(t, consumer, topic, "g", weir.HandleTx(func(ctx context.Context, tx pgx.Tx, m *weir.Received[int]) error {
			if topic == "t" && m.Value > 5 {
				return errors.New("too large")
			}
			_, err := tx.Exec(ctx, "insert into effect values ($1)", m.ID)
			return err
		}), nil)
	}
	eventually(t, "all is handled, or dead", func() bool {
		g := group(t, operator, "t", "g")
		return g.Lag == 0 && g.Dead == 4 && group(t, operator, "compacted", "g").Lag == 0
	})
	_, _, err = consumer.Maintain(ctx)
	noError(t, err)

	list, err := operator.DeadLetters(ctx, "t", "g", 0, 10)
	noError(t, err)
	n, err := operator.RedriveMany(ctx, "t", "g", weir.DeadFilter{IDs: []int64{list[0].ID}}, nil)
	if err != nil || n != 1 {
		t.Errorf("redriven: %d, %v", n, err)
	}
	eventually(t, "it is dead again", func() bool { return group(t, operator, "t", "g").Dead == 4 })
	n, err = operator.PurgeMany(ctx, "t", "g", weir.DeadFilter{}, nil)
	if err != nil || n != 4 {
		t.Errorf("purged: %d, %v", n, err)
	}
	for what, err := range map[string]error{
		"topics":      second(operator.Topics(ctx)),
		"consumers":   second(operator.Consumers(ctx, "t", "g")),
		"blockers":    second(operator.Blockers(ctx, "")),
		"read":        second(operator.Read(ctx, "t", 0, 10)),
		"after":       second(operator.After(ctx, "t", weir.AtTime(time.Now()))),
		"pause":       second(operator.PauseGroup(ctx, "t", "g")),
		"resume":      second(operator.ResumeGroup(ctx, "t", "g")),
		"alter group": operator.AlterGroup(ctx, "t", "g", weir.GroupChange{MaxAttempts: 3}),
		"alter topic": operator.AlterTopic(ctx, "t", weir.TopicChange{DropUnread: new(bool)}),
		"seek":        second(operator.Seek(ctx, "t", "g", weir.Head())),
		"delete key":  second(operator.DeleteKey(ctx, "t", "k", nil)),
		"suspend":     second(operator.SuspendMaintenance(ctx, true)),
		"suspended":   second(operator.MaintenanceSuspended(ctx)),
		"go on":       second(operator.SuspendMaintenance(ctx, false)),
	} {
		if err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
	_, found, err := operator.Current(ctx, "compacted", "k")
	if err != nil || !found {
		t.Errorf("current: %v, %v", found, err)
	}

	for what, err := range map[string]error{
		"a producer that creates":   producer.CreateTopic(ctx, "new", nil),
		"a producer that looks":     second(producer.Groups(ctx, "")),
		"a consumer that produces":  second(consumer.Produce(ctx, "t", numbers(1)...)),
		"a consumer that moves":     second(consumer.Seek(ctx, "t", "g", weir.Beginning())),
		"an operator that produces": second(operator.Produce(ctx, "t", numbers(1)...)),
		"an operator that checks":   second(operator.Check(ctx)),
	} {
		var pg *pgconn.PgError
		if !errors.As(err, &pg) || pg.Code != "42501" {
			t.Errorf("%s: error is %v, want a privilege that is missing", what, err)
		}
	}
}

// TestOperationsNamesEveryAlert: each alert that docs/metrics.md has stands in docs/operations.md, and what that quotes as logged is.
func TestOperationsNamesEveryAlert(t *testing.T) {
	metrics, err := os.ReadFile("docs/metrics.md")
	noError(t, err)
	operations, err := os.ReadFile("docs/operations.md")
	noError(t, err)
	alerts := regexp.MustCompile(`(?m)^ +- alert: (\w+)$`).FindAllStringSubmatch(string(metrics), -1)
	if len(alerts) == 0 {
		t.Error("docs/metrics.md has no alerts")
	}
	for _, a := range alerts {
		if !strings.Contains(string(operations), "\n| `"+a[1]+"` |") {
			t.Errorf("docs/operations.md does not explain the alert %s", a[1])
		}
	}
	_, logged, _ := strings.Cut(string(operations), "\n## What a consumer logs\n")
	logged, _, _ = strings.Cut(logged, "\n## ")
	var library strings.Builder
	for _, f := range goFiles(t, ".") {
		text, err := os.ReadFile(f.name)
		noError(t, err)
		library.Write(text)
	}
	n := 0
	for _, m := range regexp.MustCompile("(?m)^\\| `([^`]+)` \\|").FindAllStringSubmatch(logged, -1) {
		n++
		if !strings.Contains(library.String(), strconv.Quote(m[1])) {
			t.Errorf("docs/operations.md says that %q is logged, which is nowhere", m[1])
		}
	}
	if n == 0 {
		t.Error("docs/operations.md quotes no message of the log")
	}
}
