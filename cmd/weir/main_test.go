package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/weirhq/weir"
	"github.com/weirhq/weir/internal/pgtest"
)

// asWeir makes the test binary the program itself: the tests run it as a process of its own, with real pipes and signals,
// and with the race detector where they have it.
const asWeir = "WEIR_TEST_AS_WEIR"

func TestMain(m *testing.M) {
	if os.Getenv(asWeir) != "" {
		main()
		return
	}
	pgtest.OnCleanup(func(t pgtest.TB, dsn string) {
		if strings.Contains(t.Name(), "Violation") {
			return
		}
		ctx := context.Background()
		client, err := weir.Open(ctx, dsn, nil)
		if errors.Is(err, weir.ErrSchemaMissing) {
			return
		}
		if err != nil {
			t.Fatalf("check: %v", err)
		}
		defer client.Close()
		results, err := client.Check(ctx)
		if err != nil {
			t.Fatalf("check: %v", err)
		}
		for _, r := range results {
			if len(r.Violations) > 0 {
				t.Fatalf("%s (%s): %v", r.Name, r.Holds, r.Violations)
			}
		}
	})
	os.Exit(pgtest.Main(m))
}

// cli runs the program against one database.
type cli struct {
	t   *testing.T
	dsn string
}

// newCLI gives an empty database with Weir in it.
func newCLI(t *testing.T) *cli {
	t.Helper()
	t.Parallel()
	c := &cli{t: t, dsn: pgtest.Shared(t).Database(t)}
	c.ok("", "migrate")
	return c
}

// command is the program with these arguments, not started yet.
func (c *cli) command(args ...string) *exec.Cmd {
	cmd := exec.Command(os.Args[0], args...)
	// The race detector would have each process sleep for a second at its end.
	cmd.Env = append(os.Environ(), asWeir+"=1", "GORACE=atexit_sleep_ms=0", "WEIR_DSN="+c.dsn, "WEIR_SCHEMA=", "NO_COLOR=", "TERM=xterm")
	return cmd
}

// run runs the program to its end.
func (c *cli) run(stdin string, args ...string) (code int, stdout, stderr string) {
	c.t.Helper()
	cmd := c.command(args...)
	cmd.Stdin = strings.NewReader(stdin)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	return c.code(cmd.Run()), out.String(), errs.String()
}

func (c *cli) code(err error) int {
	c.t.Helper()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return exit.ExitCode()
	}
	if err != nil {
		c.t.Fatal(err)
	}
	return 0
}

// ok is run for what must succeed; it returns standard output.
func (c *cli) ok(stdin string, args ...string) string {
	c.t.Helper()
	code, stdout, stderr := c.run(stdin, args...)
	if code != exitOK {
		c.t.Fatalf("weir %q: exit code %d\n%s%s", args, code, stdout, stderr)
	}
	return stdout
}

// fails is run for what must end with a code, and say something that matches each of the patterns.
func (c *cli) fails(want int, stdin string, args []string, patterns ...string) (stdout, stderr string) {
	c.t.Helper()
	code, stdout, stderr := c.run(stdin, args...)
	if code != want {
		c.t.Errorf("weir %q: exit code %d, want %d\n%s", args, code, want, stderr)
	}
	for _, p := range patterns {
		if !regexp.MustCompile(p).MatchString(stderr) {
			c.t.Errorf("weir %q: %q is not in what it said:\n%s", args, p, stderr)
		}
	}
	if strings.Contains(stderr, "goroutine ") || strings.Contains(stderr, "panic:") {
		c.t.Errorf("weir %q: a stack trace:\n%s", args, stderr)
	}
	return stdout, stderr
}

// objects reads a JSON document a line.
func (c *cli) objects(text string) []map[string]any {
	c.t.Helper()
	var list []map[string]any
	for line := range strings.Lines(text) {
		var object map[string]any
		if err := json.Unmarshal([]byte(line), &object); err != nil {
			c.t.Fatalf("%v in %q", err, line)
		}
		list = append(list, object)
	}
	return list
}

func (c *cli) file(name, text string) string {
	c.t.Helper()
	path := filepath.Join(c.t.TempDir(), name)
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		c.t.Fatal(err)
	}
	return path
}

// group gives the state of a group.
func (c *cli) group(topic, group string) map[string]any {
	c.t.Helper()
	return c.objects(c.ok("", "group", "describe", topic, group, "--output", "json"))[0]
}

// odd are documents that a program that decodes and encodes JSON would change.
var odd = strings.Join([]string{
	`{"b":1,"a":2}`,
	`{"a":1,"a":2}`,
	`  { "spaces" : [ 1 ,2,  3 ] }  `,
	"\t[\t]\t",
	`"\ud800"`,
	`{"\udc00":"\u0000\u001f\/\"\\"}`,
	`1e131072`,
	`-0`,
	`123456789012345678901234567890.10`,
	`"<script>&amp;\u2028` + "\u2028 \u00e9 \U0001f600" + `"`,
	`null`,
	`""`,
	`{"crlf":true}` + "\r",
	strings.Repeat("[", 500) + strings.Repeat("]", 500),
	`"` + strings.Repeat("x", 300_000) + `"`,
}, "\n") + "\n"

func TestRoundTripIsByteForByte(t *testing.T) {
	c := newCLI(t)
	c.ok("", "topic", "create", "events")
	c.ok(odd, "produce", "events", "--batch", "4")
	if got := c.ok("", "tail", "events", "--from", "beginning"); got != odd {
		t.Errorf("tail gave back something else:\n%.500q\nwant\n%.500q", got, odd)
	}
	documents := strings.Split(strings.TrimSuffix(odd, "\n"), "\n")
	check := func(what, text string) {
		lines := strings.Split(strings.TrimSuffix(text, "\n"), "\n")
		if len(lines) != len(documents) {
			t.Fatalf("%s: %d lines, want %d", what, len(lines), len(documents))
		}
		for i, line := range lines {
			if !json.Valid([]byte(line)) {
				t.Errorf("%s: line %d is not JSON: %.200q", what, i+1, line)
			}
			_, payload, _ := strings.Cut(strings.TrimSuffix(line, "}"), `,"payload":`)
			if want := strings.ReplaceAll(documents[i], "\r", " "); payload != want {
				t.Errorf("%s: line %d has the payload %.200q, want %.200q", what, i+1, payload, want)
			}
		}
	}
	check("tail", c.ok("", "tail", "events", "--from", "beginning", "--output", "json"))
	check("consume", c.ok("", "consume", "events", "audit", "--create", "--until-idle"))
	if got := c.ok("", "consume", "events", "audit", "--until-idle"); got != "" {
		t.Errorf("handed out twice: %.200q", got)
	}

	// Several files, blank lines, no line break at the end, one transaction.
	c.ok("", "topic", "create", "files")
	one, two := c.file("one", "1\n\n  \n2"), c.file("two", "3\n")
	c.ok("4\n5", "produce", "files", one, two, "-", "--atomic", "--batch", "2")
	if got := c.ok("", "tail", "files"); got != "1\n2\n3\n4\n5\n" {
		t.Errorf("files gave %q", got)
	}
	if got := c.ok("", "tail", "files", "--from", "3", "--max", "2"); got != "3\n4\n" {
		t.Errorf("tail --from 3 --max 2 gave %q", got)
	}
	if got := c.ok("", "tail", "files", "--from", "head"); got != "" {
		t.Errorf("tail --from head gave %q", got)
	}
	for _, from := range []string{"1h", "2000-01-01", "2000-01-01T00:00:00Z"} {
		if got := c.ok("", "tail", "files", "--from", from, "-n", "1"); got != "1\n" {
			t.Errorf("tail --from %s gave %q", from, got)
		}
	}
}

func TestLinesAndBytes(t *testing.T) {
	c := newCLI(t)
	text := "a \"quoted\" line\n\n<&>\ttab\\\n\u00e9\n"
	c.ok("", "topic", "create", "notes")
	c.ok(text, "produce", "notes", "--lines")
	if got, want := c.ok("", "tail", "notes"), `"a \"quoted\" line"`+"\n\"\"\n"+`"<&>\ttab\\"`+"\n\"\u00e9\"\n"; got != want {
		t.Errorf("lines gave %q, want %q", got, want)
	}
	c.fails(exitFailed, "fine\n\xff\n", []string{"produce", "notes", "--lines"}, `stdin:2 was refused: it is not valid UTF-8`)

	raw := "\xff\x00\x01 not text\n\n{}\n"
	c.ok("", "topic", "create", "blobs", "--format", "bytes")
	c.ok(raw, "produce", "blobs")
	if got := c.ok("", "tail", "blobs"); got != raw {
		t.Errorf("bytes gave %q, want %q", got, raw)
	}
	var payload []byte
	line := c.ok("", "tail", "blobs", "--output", "json", "--max", "1")
	if err := json.Unmarshal([]byte(line), &struct{ Payload *[]byte }{&payload}); err != nil || string(payload) != "\xff\x00\x01 not text" {
		t.Errorf("bytes as JSON: %q, %v", payload, err)
	}
}

func TestKeysAndHeaders(t *testing.T) {
	c := newCLI(t)
	c.ok("", "topic", "create", "events")
	c.ok(`{"who":{"id":7},"n":"x"}`+"\n"+`{"who":{"id":"a<b"}}`+"\n"+`{"who":{"id":1.50}}`+"\n"+`{"who":3}`+"\n[]\n"+`{"who":{"id":null}}`+"\n",
		"produce", "events", "--key-field", "who.id", "--key", "none", "--header", "a=1", "--header", "b=x=y")
	var keys []any
	for _, m := range c.objects(c.ok("", "tail", "events", "--output", "json")) {
		keys = append(keys, m["key"])
		if got := fmt.Sprint(m["headers"]); got != "map[a:1 b:x=y]" {
			t.Errorf("headers %s", got)
		}
	}
	if want := []any{"7", "a<b", "1.50", "none", "none", "none"}; !slices.Equal(keys, want) {
		t.Errorf("keys %q, want %q", keys, want)
	}
	first := c.objects(c.ok("", "tail", "events", "--output", "json", "--max", "1"))[0]
	for _, name := range []string{"id", "key", "headers", "produced_at", "payload"} {
		if first[name] == nil {
			t.Errorf("a message as JSON has no %s: %v", name, first)
		}
	}
	c.fails(exitFailed, `{"k":"1"}`+"\n"+`{"k":{}}`+"\n", []string{"produce", "events", "--key-field", "k"}, `stdin:2 was refused: field k is an object`)
	c.fails(exitFailed, `{"k":"1"}`+"\n"+`{}`+"\n", []string{"produce", "events", "--key-field", "k"}, `stdin:2 was refused: it has no field k`)
	c.fails(exitFailed, `{"k":"1"}`+"\n"+`{"k":`+"\n", []string{"produce", "events", "--key-field", "k"}, `stdin:2 was refused: it is not JSON`)
	c.fails(exitFailed, `{"k":"1"}`+"\n"+`{"k":"\u0000"}`+"\n", []string{"produce", "events", "--key-field", "k"}, `stdin:2 was refused: .*without NUL`)
	if got := len(c.objects(c.ok("", "tail", "events", "--output", "json"))); got != 6 {
		t.Errorf("%d messages are stored, want the 6 of the first call", got)
	}
}

func TestProduceNamesTheRefusedLine(t *testing.T) {
	c := newCLI(t)
	c.ok("", "topic", "create", "events")
	path := c.file("in.ndjson", "1\n2\n\n3\n4\n5\n6\n{\"broken\":\n8\n")
	c.fails(exitFailed, "", []string{"produce", "events", path, "--batch", "2"},
		regexp.QuoteMeta(path)+`:8 was refused: invalid input syntax for type json`, `6 messages were stored before; go on with `+regexp.QuoteMeta(path)+`:8`)
	if got := c.ok("", "tail", "events"); got != "1\n2\n3\n4\n5\n6\n" {
		t.Errorf("stored %q", got)
	}
	stdout, _ := c.fails(exitFailed, "", []string{"produce", "events", path, "--batch", "5", "--output", "json"}, `5 messages were stored before; go on with .*:7`)
	if r := c.objects(stdout)[0]; r["stored"] != 5.0 || r["refused"] != path+":8" || r["resume"] != path+":7" {
		t.Errorf("the result is %v", r)
	}
	if got := c.ok("", "tail", "events"); got != "1\n2\n3\n4\n5\n6\n1\n2\n3\n4\n5\n" {
		t.Errorf("stored %q", got)
	}
	c.fails(exitFailed, "", []string{"produce", "events", path, "--batch", "2", "--atomic"}, `:8 was refused`, `nothing was stored`)
	c.fails(exitFailed, "", []string{"produce", "events", path}, `:8 was refused`, `no message was stored`)
	if got := c.ok("", "tail", "events"); got != "1\n2\n3\n4\n5\n6\n1\n2\n3\n4\n5\n" {
		t.Errorf("stored %q", got)
	}
	c.fails(exitFailed, "\ufeff1\n", []string{"produce", "events"}, `stdin:1 was refused: .*byte order mark`)

	// What only the server can tell: jsonb takes neither of these, though both are JSON.
	c.ok("", "topic", "create", "parsed", "--format", "jsonb")
	for _, bad := range []string{`"\u0000"`, `1e131072`, `"\ud800"`} {
		c.fails(exitFailed, strings.Repeat("1\n", 137)+bad+"\n"+strings.Repeat("2\n", 50), []string{"produce", "parsed"}, `stdin:138 was refused`, `no message was stored`)
		c.fails(exitFailed, strings.Repeat("1\n", 137)+bad+"\n", []string{"produce", "parsed", "--atomic", "--batch", "50"}, `stdin:138 was refused`, `nothing was stored`)
	}
	if got := c.ok("", "tail", "parsed"); got != "" {
		t.Errorf("stored %q", got)
	}
}

func TestProduceInput(t *testing.T) {
	c := newCLI(t)
	c.ok("", "topic", "create", "events")
	good := c.file("good", "1\n")
	c.fails(exitFailed, "", []string{"produce", "events", good, good + ".missing"}, `good\.missing: no such file`)
	c.fails(exitFailed, "", []string{"produce", "events", good, filepath.Dir(good)}, `is a directory`)
	if got := c.ok("", "tail", "events"); got != "" {
		t.Errorf("stored %q", got)
	}
	if got := c.ok("", "produce", "events"); got != "stored 0 messages in events\n" {
		t.Errorf("an empty input: %q", got)
	}
	if _, err := os.Stat("/proc/self/fdinfo"); err == nil {
		closed := c.command()
		closed.Path, closed.Args = "/bin/sh", []string{"sh", "-c", `exec "$0" produce events <&-`, os.Args[0]}
		out, err := closed.CombinedOutput()
		if code := c.code(err); code != exitFailed || !strings.Contains(string(out), "closed") {
			t.Errorf("closed input: exit code %d, %s", code, out)
		}
	}

	// What comes slowly is stored although no batch is full, and an interrupt says how much was stored.
	cmd := c.command("produce", "events")
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	var errs bytes.Buffer
	cmd.Stderr = &errs
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(in, "1\n2\n"); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the slow input is stored", func() bool { return c.ok("", "tail", "events") == "1\n2\n" })
	if err := cmd.Process.Signal(syscall.SIGINT); err != nil {
		t.Fatal(err)
	}
	if code := c.code(cmd.Wait()); code != exitFailed || !strings.Contains(errs.String(), "interrupted; 2 messages were stored") {
		t.Errorf("interrupted: exit code %d, %s", code, errs.String())
	}
}

func eventually(t *testing.T, what string, done func() bool) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !done(); {
		if time.Now().After(deadline) {
			t.Fatalf("waited in vain until %s", what)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

func TestUsageErrors(t *testing.T) {
	c := newCLI(t)
	c.ok("", "topic", "create", "events")
	for _, args := range []string{
		"nonsense", "topic", "topic nonsense", "topic list more", "topic create", "tail", "tail events --nonsense", "produce",
		"tail events --from someday", "tail events --from 0", "tail events --from 999999", "tail events --max -1", "tail events --output yaml",
		"produce events --batch 0", "produce events --header x", "produce events --lines --key-field a", "produce events --key-field a..b",
		"topic create x --format xml", "topic create x --segment-size 7", "group create events", "group create events g --max-attempts 5000",
		"group create events g --max-attempts 0", "group create events g --retry-delay -1s", "group create events g --retry-delay soon",
		"group seek events g", "consume events", "consume events g --max -1", "consume events g --start head", "consume events g --exec=",
		"consume events g --concurrency 0", "consume events g --create --concurrency 100000", "dead show events g seven", "dead redrive events g",
		"dead redrive events g 1 --all", "dead list events g --max -1", "topic drop events", "check --schema Not-A-Schema", "check --dsn =nonsense=",
		"dev --port 70000",
	} {
		_, stderr := c.fails(exitUsage, "", strings.Fields(args), `^weir: `)
		if strings.Contains(stderr, "Usage:") {
			t.Errorf("weir %s prints all of its usage:\n%s", args, stderr)
		}
	}
	c.fails(exitUsage, "", []string{"topc"}, `did you mean "topic"`)
	c.fails(exitUsage, "", []string{"topic", "lst"}, `did you mean "list"`)
}

func TestFailures(t *testing.T) {
	c := newCLI(t)
	c.ok("", "topic", "create", "events")
	c.ok("", "group", "create", "events", "audit")
	c.fails(exitFailed, "1\n", []string{"produce", "nope"}, `topic not found: "nope"`, "weir topic create")
	c.fails(exitFailed, "", []string{"tail", "nope"}, "weir topic create")
	c.fails(exitFailed, "", []string{"topic", "describe", "nope"}, "weir topic create")
	c.fails(exitFailed, "", []string{"topic", "drop", "nope", "--yes"}, "weir topic create")
	c.fails(exitFailed, "", []string{"group", "list", "nope"}, "weir topic create")
	c.fails(exitFailed, "", []string{"group", "describe", "events", "nope"}, "weir group create")
	c.fails(exitFailed, "", []string{"group", "drop", "events", "nope", "--yes"}, "weir group create")
	c.fails(exitFailed, "", []string{"group", "seek", "events", "nope", "head"}, "weir group create")
	c.fails(exitFailed, "", []string{"consume", "events", "nope"}, "weir group create")
	c.fails(exitFailed, "", []string{"consume", "nope", "audit", "--create"}, "weir topic create")
	c.fails(exitFailed, "", []string{"dead", "list", "events", "nope"}, "weir group create")
	c.fails(exitFailed, "", []string{"dead", "show", "events", "audit", "7"}, "has no dead letter 7")
	c.fails(exitFailed, "", []string{"dead", "redrive", "events", "audit", "7"}, "has no dead letter 7")
	c.fails(exitFailed, "", []string{"topic", "create", "events", "--format", "bytes"}, "exists with format json")
	c.fails(exitFailed, "", []string{"topic", "list", "--schema", "elsewhere"}, "not installed", "weir migrate")
	c.fails(exitFailed, "", []string{"topic", "list", "--dsn", "postgres://x:secret@127.0.0.1:1/x"}, "connection refused", "weir dev")
	if _, stderr := c.fails(exitFailed, "", []string{"topic", "list", "--dsn", "postgres://x:secret@127.0.0.1:1/x"}); strings.Contains(stderr, "secret") {
		t.Errorf("the password was printed:\n%s", stderr)
	}
	if help := c.ok("", "--help"); strings.Contains(help, c.dsn) {
		t.Errorf("the help shows the value of WEIR_DSN:\n%s", help)
	}
}

func TestListingsAsJSON(t *testing.T) {
	c := newCLI(t)
	for _, topic := range []string{"a", "b"} {
		created := c.objects(c.ok("", "topic", "create", topic, "--output", "json"))
		if len(created) != 1 || created[0]["topic"] != topic {
			t.Errorf("created %v", created)
		}
		c.ok("", "group", "create", topic, "g", "--max-attempts", "1", "--output", "json")
		c.ok("", "group", "create", topic, "h", "--start", "head")
		stored := c.objects(c.ok("1\n2\n3\n", "produce", topic, "--output", "json"))
		if len(stored) != 1 || stored[0]["stored"] != 3.0 || stored[0]["first_id"] != 1.0 || stored[0]["last_id"] != 3.0 {
			t.Errorf("stored %v", stored)
		}
		c.ok("", "tail", topic) // until they are settled
	}
	c.ok("", "consume", "a", "g", "--exec", "false", "--until-idle")
	for _, list := range []struct {
		args string
		want int
		has  string
	}{
		{"topic list", 2, "settled"},
		{"topic describe a", 1, "segments"},
		{"group list", 4, "lag"},
		{"group list a", 2, "committed"},
		{"group describe a g", 1, "dead"},
		{"dead list a g", 3, "error"},
		{"dead list a g --max 2", 2, "errors"},
		{"dead list a g --after 2", 1, "payload"},
		{"dead list b g", 0, ""},
		{"dead show a g 2", 1, "payload"},
		{"tail a", 3, "id"},
		{"check", 12, "violations"},
		{"version", 1, "go"},
		{"group seek b g 2", 1, "was"},
		{"dead redrive a g 1", 1, "redriven"},
		{"dead purge a g 2 --yes", 1, "purged"},
		{"group drop b g --yes", 1, "dropped"},
		{"topic drop b --yes", 1, "dropped"},
		{"migrate", 1, "schema"},
	} {
		objects := c.objects(c.ok("", append(strings.Fields(list.args), "--output", "json")...))
		if list.args == "check" {
			list.want = max(list.want, len(objects)) // there may be more of them
		}
		if len(objects) != list.want {
			t.Errorf("weir %s: %d documents, want %d: %v", list.args, len(objects), list.want, objects)
		}
		for _, o := range objects {
			if _, ok := o[list.has]; !ok {
				t.Errorf("weir %s: no field %s in %v", list.args, list.has, o)
			}
		}
	}
}

func TestTables(t *testing.T) {
	c := newCLI(t)
	c.ok("", "topic", "create", "events")
	c.ok("", "topic", "create", "\u65e5\u672c")
	c.ok(strings.Repeat("1\n", 12), "produce", "events")
	lines := strings.Split(c.ok("", "topic", "list"), "\n")
	if len(lines) != 4 || !regexp.MustCompile(`^TOPIC +FORMAT +HEAD +SETTLED +MESSAGES +BYTES +OLDEST +RETENTION +SEGMENTS +GROUPS +CREATED$`).MatchString(lines[0]) {
		t.Fatalf("the table is\n%s", strings.Join(lines, "\n"))
	}
	if !regexp.MustCompile(`^events  json +12 .* \d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$`).MatchString(lines[1]) {
		t.Errorf("a row is %q", lines[1])
	}
	// A wide character takes the place of two.
	if at, wide := strings.Index(lines[1], "json"), strings.Index(lines[2], "json"); at != 8 || wide != 2*3+4 {
		t.Errorf("the columns are not aligned:\n%s", strings.Join(lines, "\n"))
	}
	if all := strings.Join(lines, ""); strings.Contains(all, "\x1b") {
		t.Errorf("colour without a terminal: %q", all)
	}
	if got := c.ok("", "topic", "describe", "events"); !regexp.MustCompile(`(?m)^head: +12$`).MatchString(got) {
		t.Errorf("describe gave\n%s", got)
	}
	if got := c.ok("", "topic", "create", "events", "--quiet"); got != "" {
		t.Errorf("--quiet gave %q", got)
	}
	if got := visible("a\x1b[31m\nb\u009b"); got != `a\x1b[31m\nb\u009b` {
		t.Errorf("control characters show as %q", got)
	}
}

func TestBrokenPipe(t *testing.T) {
	c := newCLI(t)
	c.ok("", "topic", "create", "events")
	var in strings.Builder
	for i := range 20_000 {
		fmt.Fprintf(&in, "{\"n\":%d,\"pad\":%q}\n", i, strings.Repeat("p", 100))
	}
	c.ok(in.String(), "produce", "events")
	for _, args := range [][]string{{"tail", "events"}, {"consume", "events", "audit", "--create"}} {
		cmd := c.command(args...)
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		var errs bytes.Buffer
		cmd.Stderr = &errs
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		buffer := make([]byte, 1000)
		if _, err := io.ReadFull(out, buffer); err != nil {
			t.Fatal(err)
		}
		out.Close()
		if code := c.code(cmd.Wait()); code != exitFailed || errs.Len() > 0 {
			t.Errorf("weir %q: exit code %d, standard error %q; want 1 and nothing", args, code, errs.String())
		}
	}
	// A pipe holds 64 KiB at the most, so what was written and never read is bounded; the rest comes again, without a wait
	// for a lease to expire and without a counted attempt.
	seen := map[float64]bool{}
	began := time.Now()
	for _, m := range c.objects(c.ok("", "consume", "events", "audit", "--until-idle")) {
		seen[m["id"].(float64)] = true
		if m["attempt"] != 1.0 {
			t.Errorf("message %v is handed out as attempt %v", m["id"], m["attempt"])
		}
	}
	if time.Since(began) > 12*time.Second {
		t.Errorf("it took %v: the lease was not given back", time.Since(began))
	}
	if len(seen) < 20_000-600 || !seen[20_000] {
		t.Errorf("%d of 20000 messages were left", len(seen))
	}
}

func TestFullDisk(t *testing.T) {
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	if err != nil {
		t.Skip("this system has no /dev/full")
	}
	defer full.Close()
	c := newCLI(t)
	c.ok("", "topic", "create", "events")
	c.ok("1\n2\n3\n", "produce", "events")
	for _, args := range []string{"tail events", "topic list", "consume events audit --create", "--help", "version", "completion bash", "check"} {
		cmd := c.command(strings.Fields(args)...)
		var errs bytes.Buffer
		cmd.Stdout, cmd.Stderr = full, &errs
		if code := c.code(cmd.Run()); code != exitFailed || errs.String() != "weir: write standard output: no space left on device\n" {
			t.Errorf("weir %s: exit code %d, %q", args, code, errs.String())
		}
	}
	if group := c.group("events", "audit"); group["committed"] != 0.0 {
		t.Errorf("acknowledged without being written: %v", group)
	}
	if got := len(c.objects(c.ok("", "consume", "events", "audit", "--until-idle"))); got != 3 {
		t.Errorf("%d messages are left, want 3", got)
	}
}

func TestConsumeExec(t *testing.T) {
	c := newCLI(t)
	c.ok("", "topic", "create", "jobs")
	c.ok("", "group", "create", "jobs", "w", "--max-attempts", "3", "--retry-delay", "0s")
	c.ok(`{"do":"right"}`+"\n"+`{"do":"wrong"}`+"\n"+`{"do":"right again"}`+"\n", "produce", "jobs", "--key-field", "do")
	program := `payload=$(cat); echo "$WEIR_ID|$WEIR_KEY|$WEIR_TOPIC|$WEIR_GROUP|$WEIR_ATTEMPT|$payload"
		case $WEIR_KEY in wrong) echo "cannot do that" >&2; exit 3;; esac`
	code, stdout, stderr := c.run("", "consume", "jobs", "w", "--exec", program, "--until-idle", "--concurrency", "3")
	if code != exitOK || !strings.Contains(stderr, "2 messages handled, 3 attempts failed") {
		t.Errorf("exit code %d, %s", code, stderr)
	}
	lines := strings.Split(strings.TrimSpace(stdout), "\n")
	slices.Sort(lines)
	if want := []string{
		`1|right|jobs|w|1|{"do":"right"}`,
		`2|wrong|jobs|w|1|{"do":"wrong"}`,
		`2|wrong|jobs|w|2|{"do":"wrong"}`,
		`2|wrong|jobs|w|3|{"do":"wrong"}`,
		`3|right again|jobs|w|1|{"do":"right again"}`,
	}; !slices.Equal(lines, want) {
		t.Errorf("the program was run with\n%s", strings.Join(lines, "\n"))
	}

	if got := c.ok("", "dead", "list", "jobs", "w"); !regexp.MustCompile(`(?m)^ 2  wrong +3  \S+Z  exit status 3: cannot do that$`).MatchString(got) {
		t.Errorf("dead list gave\n%s", got)
	}
	shown := c.ok("", "dead", "show", "jobs", "w", "2")
	if strings.Count(shown, "cannot do that") != 3 || !strings.HasSuffix(shown, "payload:\n{\"do\":\"wrong\"}\n") {
		t.Errorf("dead show gave\n%s", shown)
	}
	if got := c.ok("", "dead", "redrive", "jobs", "w", "2"); got != "1 dead letter redriven\n" {
		t.Errorf("redrive gave %q", got)
	}
	again := c.objects(c.ok("", "consume", "jobs", "w", "--until-idle"))
	if len(again) != 1 || again[0]["id"] != 2.0 || again[0]["attempt"] != 1.0 {
		t.Errorf("after the redrive came %v", again)
	}
	if got := c.ok("", "dead", "redrive", "jobs", "w", "--all"); got != "0 dead letters redriven\n" {
		t.Errorf("redrive --all gave %q", got)
	}

	// A program that takes too long, and one that leaves something in the background.
	c.ok("", "group", "create", "jobs", "slow", "--max-attempts", "1")
	began := time.Now()
	c.ok("", "consume", "jobs", "slow", "--exec", "sleep 60 & wait", "--timeout", "200ms", "--until-idle", "--concurrency", "3")
	if time.Since(began) > 20*time.Second {
		t.Errorf("programs past their time were waited for: %v", time.Since(began))
	}
	for _, d := range c.objects(c.ok("", "dead", "list", "jobs", "slow", "--output", "json")) {
		if d["error"] != "handler exceeded its time limit of 200ms" {
			t.Errorf("the error is %v", d["error"])
		}
	}
	if got := c.group("jobs", "slow")["dead"]; got != 3.0 {
		t.Errorf("%v are dead, want 3", got)
	}
	c.ok("", "group", "create", "jobs", "background", "--max-attempts", "1")
	c.ok("", "consume", "jobs", "background", "--exec", "sleep 2 &", "--until-idle", "--concurrency", "3")
	if got := c.group("jobs", "background"); got["dead"] != 0.0 || got["committed"] != 3.0 {
		t.Errorf("with programs in the background: %v", got)
	}
}

func TestConsumeStops(t *testing.T) {
	c := newCLI(t)
	c.ok("", "topic", "create", "events")
	c.ok("1\n2\n3\n4\n5\n", "produce", "events")
	c.ok("", "group", "create", "events", "few")
	for _, want := range [][]float64{{1, 2}, {3, 4}, {5}} {
		var ids []float64
		for _, m := range c.objects(c.ok("", "consume", "events", "few", "--max", fmt.Sprint(len(want)))) {
			ids = append(ids, m["id"].(float64))
			if m["attempt"] != 1.0 {
				t.Errorf("message %v is handed out as attempt %v", m["id"], m["attempt"])
			}
		}
		if !slices.Equal(ids, want) {
			t.Errorf("--max gave %v, want %v", ids, want)
		}
	}

	for _, sig := range []os.Signal{syscall.SIGTERM, syscall.SIGINT} {
		group := sig.String()
		cmd := c.command("consume", "events", group, "--create", "--exec", "echo begins; sleep 1; echo ends", "--concurrency", "2")
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		first := make([]byte, len("begins\n"))
		if _, err := io.ReadFull(out, first); err != nil {
			t.Fatal(err)
		}
		if err := cmd.Process.Signal(sig); err != nil {
			t.Fatal(err)
		}
		rest, err := io.ReadAll(out)
		if err != nil {
			t.Fatal(err)
		}
		if code := c.code(cmd.Wait()); code != exitOK {
			t.Errorf("%v: exit code %d", sig, code)
		}
		begun, ended := strings.Count(string(first)+string(rest), "begins"), strings.Count(string(rest), "ends")
		if begun != ended || begun > 2 {
			t.Errorf("%v: %d programs began and %d ended", sig, begun, ended)
		}
		left := c.objects(c.ok("", "consume", "events", group, "--until-idle"))
		if len(left)+ended != 5 {
			t.Errorf("%v: %d were handled and %d were left, of 5", sig, ended, len(left))
		}
		for _, m := range left {
			if m["attempt"] != 1.0 {
				t.Errorf("%v: message %v came back as attempt %v", sig, m["id"], m["attempt"])
			}
		}
	}

	// A program that does not end in time is cut off, and its message given back.
	cmd := c.command("consume", "events", "cut", "--create", "--exec", "echo begins; sleep 60", "--stop-timeout", "100ms")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(out, make([]byte, len("begins\n"))); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if code := c.code(cmd.Wait()); code != exitOK || time.Since(began) > 15*time.Second {
		t.Errorf("exit code %d after %v", code, time.Since(began))
	}
	if got := len(c.objects(c.ok("", "consume", "events", "cut", "--until-idle"))); got != 5 {
		t.Errorf("%d messages are left, want 5", got)
	}
}

func TestTailFollows(t *testing.T) {
	c := newCLI(t)
	c.ok("", "topic", "create", "events")
	c.ok("1\n", "produce", "events")
	cmd := c.command("tail", "events", "--from", "beginning", "--follow")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	for i := 1; i <= 3; i++ {
		line := make([]byte, 2)
		if _, err := io.ReadFull(out, line); err != nil || string(line) != fmt.Sprintf("%d\n", i) {
			t.Fatalf("line %d is %q, %v", i, line, err)
		}
		c.ok(fmt.Sprintf("%d\n", i+1), "produce", "events")
	}
	if err := cmd.Process.Signal(syscall.SIGINT); err != nil {
		t.Fatal(err)
	}
	_, _ = io.ReadAll(out)
	if code := c.code(cmd.Wait()); code != exitOK {
		t.Errorf("exit code %d", code)
	}
}

// A message that commits late has a lower id than one that is there already: tail waits for it.
func TestTailWaitsForTheSettledHead(t *testing.T) {
	c := newCLI(t)
	c.ok("", "topic", "create", "events")
	conn, err := pgx.Connect(t.Context(), c.dsn)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.Background())
	tx, err := conn.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tx.Exec(t.Context(), `select weir.produce('events', '"late"')`); err != nil {
		t.Fatal(err)
	}
	c.ok("\"early\"\n", "produce", "events")
	var (
		got    string
		waiter sync.WaitGroup
	)
	waiter.Go(func() { got = c.ok("", "tail", "events") })
	time.Sleep(300 * time.Millisecond) // it would have ended by now; too short a time only makes the test weaker
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	waiter.Wait()
	if got != "\"late\"\n\"early\"\n" {
		t.Errorf("tail gave %q", got)
	}
}

func TestGroupsMove(t *testing.T) {
	c := newCLI(t)
	c.ok("", "topic", "create", "events")
	c.ok("1\n2\n3\n", "produce", "events")
	c.ok("", "tail", "events") // until they are settled: a group cannot begin after the settled head
	c.ok("", "group", "create", "events", "g", "--start", "3")
	if got := c.ok("", "group", "seek", "events", "g", "2"); !strings.Contains(got, "from id 2 to 1") {
		t.Errorf("seek gave %q", got)
	}
	if got := len(c.objects(c.ok("", "consume", "events", "g", "--until-idle"))); got != 2 {
		t.Errorf("%d messages, want 2", got)
	}
	c.fails(exitUsage, "y\n", []string{"group", "drop", "events", "g"}, "--yes")
	c.ok("", "group", "drop", "events", "g", "--yes")
	c.fails(exitUsage, "y\n", []string{"topic", "drop", "events"}, "--yes")
	c.ok("", "topic", "drop", "events", "--yes")
	if got := c.ok("", "topic", "list", "--output", "json"); got != "" {
		t.Errorf("left: %s", got)
	}
}

func TestCheckFindsAViolation(t *testing.T) {
	c := newCLI(t)
	c.ok("", "topic", "create", "events")
	if got := c.ok("", "check"); !regexp.MustCompile(`all \d+ invariants hold`).MatchString(got) {
		t.Errorf("check gave %q", got)
	}
	if got := c.ok("", "check", "--quiet"); got != "" {
		t.Errorf("check --quiet gave %q", got)
	}
	conn, err := pgx.Connect(t.Context(), c.dsn)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.Background())
	if _, err := conn.Exec(t.Context(), "alter sequence weir.log_1_id cache 20"); err != nil {
		t.Fatal(err)
	}
	stdout, _ := c.fails(exitFailed, "", []string{"check"}, `1 of \d+ invariants are violated`)
	if !strings.Contains(stdout, "VIOLATED  sequence_rises") || !strings.Contains(stdout, "topic=events") {
		t.Errorf("check gave\n%s", stdout)
	}
	stdout, _ = c.fails(exitFailed, "", []string{"check", "--output", "json"})
	violations := 0
	for _, r := range c.objects(stdout) {
		violations += len(r["violations"].([]any))
	}
	if violations != 1 {
		t.Errorf("%d violations in\n%s", violations, stdout)
	}
}

func TestSchemas(t *testing.T) {
	c := newCLI(t)
	c.ok("", "migrate", "--schema", "other")
	c.ok("", "topic", "create", "events", "--schema", "other")
	if got := c.ok("", "topic", "list", "--output", "json"); got != "" {
		t.Errorf("the topic is in the wrong schema: %s", got)
	}
	cmd := c.command("topic", "list", "--output", "json")
	cmd.Env = append(cmd.Env, "WEIR_SCHEMA=other")
	if out, err := cmd.Output(); err != nil || len(c.objects(string(out))) != 1 {
		t.Errorf("WEIR_SCHEMA: %s, %v", out, err)
	}
}

func TestCompletion(t *testing.T) {
	c := newCLI(t)
	for _, shell := range []string{"bash", "zsh", "fish", "powershell"} {
		if got := c.ok("", "completion", shell); len(got) < 1000 {
			t.Errorf("completion %s gave %q", shell, got)
		}
	}
	c.ok("", "topic", "create", "events")
	c.ok("", "group", "create", "events", "audit")
	for args, want := range map[string]string{"tail": "events", "consume events": "audit"} {
		if got := c.ok("", append(append([]string{"__complete"}, strings.Fields(args)...), "")...); !strings.HasPrefix(got, want+"\n") {
			t.Errorf("completing %q gave %q", args, got)
		}
	}
}

func TestDev(t *testing.T) {
	t.Parallel()
	data := filepath.Join(t.TempDir(), "data")
	// A server that runs as another user than this one must reach the folder.
	for dir := filepath.Dir(data); dir != filepath.Clean(os.TempDir()) && dir != "/"; dir = filepath.Dir(dir) {
		if err := os.Chmod(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	var dsn string
	for range 2 {
		c := &cli{t: t}
		cmd := c.command("dev", "--data", data, "--port", "0", "--output", "json")
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		var errs bytes.Buffer
		cmd.Stderr = &errs
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		var info devJSON
		if err := json.NewDecoder(out).Decode(&info); err != nil {
			_ = cmd.Wait()
			t.Fatalf("%v\n%s", err, errs.String())
		}
		c.dsn = info.DSN
		if dsn == "" {
			c.ok("", "topic", "create", "events")
			c.ok("1\n", "produce", "events")
		}
		dsn = info.DSN
		if got := c.ok("", "tail", "events"); got != "1\n" {
			t.Errorf("the folder keeps %q", got)
		}
		c.fails(exitFailed, "", []string{"dev", "--data", data, "--port", "0"}, "in use")
		if err := cmd.Process.Signal(syscall.SIGINT); err != nil {
			t.Fatal(err)
		}
		if code := c.code(cmd.Wait()); code != exitOK {
			t.Errorf("exit code %d\n%s", code, errs.String())
		}
	}
}

func TestEveryCommandIsDocumented(t *testing.T) {
	t.Parallel()
	g := newGlobal(strings.NewReader(""), io.Discard, io.Discard)
	var visit func(cmd *cobra.Command)
	visit = func(cmd *cobra.Command) {
		if cmd.Short == "" || cmd.Long == "" || cmd.Example == "" {
			t.Errorf("%q has Short %q, Long %q, Example %q", cmd.CommandPath(), cmd.Short, cmd.Long, cmd.Example)
		}
		for line := range strings.Lines(cmd.Long) {
			if len(line) > 125 {
				t.Errorf("%q has a line of %d characters: %s", cmd.CommandPath(), len(line), line)
			}
		}
		for _, child := range cmd.Commands() {
			visit(child)
		}
	}
	visit(newRoot(g))
}

// Dead letters by filter: listed, redriven, sent to another topic, purged.
func TestDeadByFilter(t *testing.T) {
	c := newCLI(t)
	c.ok("", "topic", "create", "jobs")
	c.ok("", "topic", "create", "by-hand")
	c.ok("", "topic", "create", "raw", "--format", "bytes")
	c.ok("", "group", "create", "jobs", "w", "--max-attempts", "1")
	for i := range 10 {
		c.ok(fmt.Sprintf("%d\n", i), "produce", "jobs", "--key", fmt.Sprintf("k%d", i%2), "--header", fmt.Sprintf("n=%d", i%3))
	}
	c.ok("", "consume", "jobs", "w", "--exec", `echo "no $WEIR_ID" >&2; exit 1`, "--until-idle")
	ids := func(args string) string {
		t.Helper()
		var list []string
		for _, d := range c.objects(c.ok("", append(strings.Fields("dead list jobs w --output json "+args), "--max", "100")...)) {
			list = append(list, fmt.Sprint(d["id"]))
		}
		return strings.Join(list, " ")
	}
	for args, want := range map[string]string{
		"":                                      "1 2 3 4 5 6 7 8 9 10",
		"--key k1":                              "2 4 6 8 10",
		"--key-prefix k --header n=0 --after 1": "4 7 10",
		"--header n=1 --key k1":                 "2 8",
		"--died-after 1h":                       "1 2 3 4 5 6 7 8 9 10",
		"--died-after 2100-01-01":               "",
		"--produced-before 2000-01-01T00:00:00": "",
		"--produced-after 2000-01-01T00:00:00Z --died-before 0s --min-attempts 1": "1 2 3 4 5 6 7 8 9 10",
		"--min-attempts 2": "",
	} {
		if got := ids(args); got != want {
			t.Errorf("dead list %s gave %s, want %s", args, got, want)
		}
	}
	if got := c.ok("", "dead", "list", "jobs", "w", "--error", "no 10"); strings.Count(got, "\n") != 2 || !strings.Contains(got, "exit status 1: no 10") {
		t.Errorf("dead list --error gave\n%s", got)
	}

	sent := c.objects(c.ok("", "dead", "redrive", "jobs", "w", "--key", "k1", "--to", "by-hand", "--output", "json"))
	if len(sent) != 1 || sent[0]["redriven"] != 5.0 || sent[0]["to"] != "by-hand" || sent[0]["topic"] != "jobs" || sent[0]["group"] != "w" {
		t.Errorf("redrive --to gave %v", sent)
	}
	for i, m := range c.objects(c.ok("", "tail", "by-hand", "--output", "json")) {
		headers := m["headers"].(map[string]any)
		if m["payload"] != float64(2*i+1) || m["key"] != "k1" || headers["weir-dead-topic"] != "jobs" || headers["weir-dead-group"] != "w" ||
			headers["weir-dead-id"] != fmt.Sprint(2*i+2) || headers["weir-dead-error"] != fmt.Sprintf("exit status 1: no %d", 2*i+2) || headers["n"] != fmt.Sprint((2*i+1)%3) {
			t.Errorf("message %d in the other topic is %v", i, m)
		}
	}
	if got := ids(""); got != "1 3 5 7 9" {
		t.Errorf("left are %s", got)
	}
	if got := c.ok("", "dead", "redrive", "jobs", "w", "--header", "n=0"); got != "2 dead letters redriven\n" {
		t.Errorf("redrive --header gave %q", got)
	}
	c.fails(exitUsage, "y\n", []string{"dead", "purge", "jobs", "w", "--error", "no"}, "--yes")
	if got := c.ok("", "dead", "purge", "jobs", "w", "--error", "no 3", "--yes"); got != "1 dead letter purged\n" {
		t.Errorf("purge --error gave %q", got)
	}
	if got := c.ok("", "dead", "purge", "jobs", "w", "--error", "no 3", "--yes"); got != "0 dead letters purged\n" {
		t.Errorf("purge --error, again, gave %q", got)
	}
	stdout, _ := c.fails(exitFailed, "", []string{"dead", "purge", "jobs", "w", "9", "5", "4", "--yes"}, "has no dead letter 4")
	if stdout != "2 dead letters purged\n" {
		t.Errorf("purge of ids gave %q", stdout)
	}
	if got := ids(""); got != "" {
		t.Errorf("left are %s", got)
	}

	c.ok("", "group", "create", "jobs", "v", "--max-attempts", "1")
	c.ok("", "consume", "jobs", "v", "--exec", "exit 1", "--until-idle")
	c.fails(exitFailed, "", strings.Fields("dead redrive jobs v --all --to raw"), "'jobs', which has format json", "format json or jsonb")
	c.fails(exitFailed, "", strings.Fields("dead redrive jobs v --all --to nowhere"), "topic 'nowhere' does not exist", "weir topic create")
	if got := c.ok("", "dead", "purge", "jobs", "v", "--all", "--yes"); got != "10 dead letters purged\n" {
		t.Errorf("purge --all gave %q", got)
	}
	for args, says := range map[string]string{
		"redrive jobs w --key k 1":                  "ids or flags",
		"redrive jobs w --key k --all":              "--all or flags",
		"redrive jobs w --key=":                     "--key is",
		"redrive jobs w --min-attempts -1":          "--min-attempts is",
		"redrive jobs w --header x":                 "name=value",
		"redrive jobs w --died-after someday":       "--died-after: .*is no time",
		"redrive jobs w --all --to=":                "--to is empty",
		"purge jobs w":                              "give the ids of dead letters, flags that pick some, or --all",
		"purge jobs w --produced-before soon --yes": "--produced-before: .*how long ago",
	} {
		c.fails(exitUsage, "", strings.Fields("dead "+args), says)
	}
}

// Many dead letters are shown to move, on a terminal only.
func TestDeadRedriveMany(t *testing.T) {
	c := newCLI(t)
	c.ok("", "topic", "create", "jobs")
	c.ok("", "group", "create", "jobs", "w", "--mode", "queue")
	conn, err := pgx.Connect(t.Context(), c.dsn)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.Background())
	for _, text := range []string{
		"insert into weir.log_1 (payload) select '1' from generate_series(1, 2500)",
		`insert into weir.delivery (group_id, message_id, state, due_at, attempt, payload, produced_at, errors)
			select 1, id, 'dead', clock_timestamp(), 1, payload, produced_at,
				jsonb_build_array(jsonb_build_object('attempt', 1, 'at', clock_timestamp(), 'error', 'no')) from weir.log_1`,
	} {
		if _, err := conn.Exec(t.Context(), text); err != nil {
			t.Fatal(err)
		}
	}
	c.ok("", "tail", "jobs") // until they are settled
	c.ok("", "group", "seek", "jobs", "w", "head")
	code, stdout, stderr := c.run("", "dead", "redrive", "jobs", "w", "--all")
	if code != exitOK || stdout != "2500 dead letters redriven\n" || stderr != "" {
		t.Errorf("redrive gave code %d, %q, %q", code, stdout, stderr)
	}
	if g := c.group("jobs", "w"); g["dead"] != 0.0 || g["retrying"] != 2500.0 {
		t.Errorf("the group is %v", g)
	}
}

func TestGroupModes(t *testing.T) {
	c := newCLI(t)
	c.ok("", "topic", "create", "events")
	created := c.objects(c.ok("", strings.Fields("group create events o --mode ordered --shards 64 --key-prefix eu- --header a=1 --header b=x=y --output json")...))
	if len(created) != 1 || created[0]["mode"] != "ordered" || created[0]["shards"] != 64.0 || created[0]["key_prefix"] != "eu-" ||
		fmt.Sprint(created[0]["headers"]) != "map[a:1 b:x=y]" {
		t.Errorf("created %v", created)
	}
	c.ok("", "group", "create", "events", "q", "--mode", "queue")
	if got := c.ok("", "group", "create", "events", "s"); got != "group \"s\" is there on topic \"events\", mode stream, at id 0\n" {
		t.Errorf("create gave %q", got)
	}
	c.ok("", "group", "create", "events", "q") // whatever its mode is
	c.fails(exitFailed, "", []string{"group", "create", "events", "q", "--mode", "stream"}, "exists with mode queue")

	shown := c.ok("", "group", "describe", "events", "o")
	for _, p := range []string{
		`(?m)^mode: +ordered$`, `(?m)^shards: +64$`, `(?m)^filter: +keys that begin with "eu-", header a=1, header b=x=y$`, `(?m)^paused: +no$`,
		`(?m)^waiting: +0$`, `(?m)^retrying: +0$`, `(?m)^dead: +0$`, `(?m)^consumers: +0$`,
	} {
		if !regexp.MustCompile(p).MatchString(shown) {
			t.Errorf("describe does not show %s:\n%s", p, shown)
		}
	}
	c.ok("", "group", "pause", "events", "q")
	list := c.ok("", "group", "list", "events")
	for _, p := range []string{
		`^TOPIC +GROUP +MODE +HEAD +CLAIMED +COMMITTED +LAG +AGE +LEASES +WAITING +RETRYING +DEAD +PAUSED\n`,
		`(?m)^events +o +ordered .* -$`, `(?m)^events +q +queue .* \d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$`, `(?m)^events +s +stream .* -$`,
	} {
		if !regexp.MustCompile(p).MatchString(list) {
			t.Errorf("list does not show %s:\n%s", p, list)
		}
	}

	// The filter holds: of four messages one is handed out.
	for _, m := range []struct{ key, header string }{{"eu-1", "a=1"}, {"us-1", "a=1"}, {"eu-2", "a=2"}, {"eu-3", "b=x=y"}} {
		c.ok("1\n", "produce", "events", "--key", m.key, "--header", m.header, "--header", "c=3")
	}
	c.ok("1\n", "produce", "events", "--key", "eu-4", "--header", "a=1", "--header", "b=x=y", "--header", "c=3")
	if got := c.objects(c.ok("", "consume", "events", "o", "--until-idle")); len(got) != 1 || got[0]["key"] != "eu-4" {
		t.Errorf("with the filter came %v", got)
	}
	if g := c.group("events", "o"); g["lag"] != 0.0 {
		t.Errorf("the group is %v", g)
	}

	for args, says := range map[string]string{
		"create events x --mode fifo":                     `--mode is "fifo", it must be stream, ordered or queue`,
		"create events x --mode ordered --shards 3":       `--shards is 3, it must be a power of two`,
		"create events x --mode ordered --shards 512":     `--shards is 512`,
		"create events x --mode ordered --shards 0":       `--shards is 0`,
		"create events x --shards 4":                      `give --mode ordered`,
		"create events x --header y":                      `name=value`,
		"alter events o":                                  `nothing to change`,
		"alter events o --shards 5":                       `--shards is 5`,
		"alter events o --header a=1 --no-headers":        `not both`,
		"alter events s --shards 4":                       `only an ordered group has shards`,
		"alter events s --retry-delay -1s":                `--retry-delay is -1s`,
		"alter events s --max-attempts 0":                 `--max-attempts is 0`,
		"alter events s --max-attempts 1001":              `max_attempts is 1001`,
		"alter events s --retry-max 1ms --retry-delay 1s": `retry_max`,
		"rename events s q":                               `group 'q' exists on topic 'events'.*another name`,
		"rename events s":                                 `NAME is missing`,
		"seek events s 999":                               `target is id 999, it must be from 1 to the settled head \+ 1, 6`,
	} {
		c.fails(exitUsage, "", strings.Fields("group "+args), `^weir: `, says)
	}
	c.fails(exitUsage, "", []string{"group", "rename", "events", "s", " spaced"}, "space")
	for _, args := range []string{"pause events x", "resume events x", "alter events x --max-attempts 5", "rename events x y", "describe events x"} {
		c.fails(exitFailed, "", strings.Fields("group "+args), `weir group create`)
	}
	if got := c.objects(c.ok("", "group", "list", "events", "--output", "json")); len(got) != 3 {
		t.Errorf("%d groups, want 3: %v", len(got), got)
	}
	for args, want := range map[string]string{
		"group create events x --mode ": "stream\nordered\nqueue\n", "group alter events o --shards ": "1\n2\n4\n", "group pause events ": "o\nq\ns\n",
		"dead redrive events q --to ": "events\n", "group rename events ": "o\nq\ns\n",
	} {
		args, last := strings.Fields(args), ""
		if got := c.ok("", append(append([]string{"__complete"}, args...), last)...); !strings.HasPrefix(got, want) {
			t.Errorf("completing %q gave %q", args, got)
		}
	}
}

func TestGroupChanges(t *testing.T) {
	c := newCLI(t)
	c.ok("", "topic", "create", "events")
	c.ok("", strings.Fields("group create events g --mode ordered --shards 4 --key-prefix k")...)
	c.ok("1\n2\n3\n", "produce", "events", "--key", "k")
	gate := filepath.Join(t.TempDir(), "gate")
	cmd := c.command("consume", "events", "g", "--exec", `echo begins; while ! [ -e "$GATE" ]; do sleep 0.02; done`)
	cmd.Env = append(cmd.Env, "GATE="+gate)
	var errs bytes.Buffer
	cmd.Stderr = &errs
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(out, make([]byte, len("begins\n"))); err != nil {
		t.Fatal(err)
	}

	// It is there, and holds the shard of the key.
	var consumer map[string]any
	eventually(t, "the consumer is listed", func() bool {
		list := c.group("events", "g")["consumers"].([]any)
		if len(list) == 1 {
			consumer = list[0].(map[string]any)
		}
		return consumer["started_at"] != nil && consumer["pid"] == float64(cmd.Process.Pid)
	})
	for _, name := range []string{"consumer", "last_seen", "oldest", "host"} {
		if consumer[name] == nil {
			t.Errorf("the consumer has no %s: %v", name, consumer)
		}
	}
	if consumer["leases"] != 1.0 || consumer["messages"] != 3.0 || consumer["concurrency"] != 1.0 {
		t.Errorf("the consumer is %v, want one lease with three messages", consumer)
	}
	shown := c.ok("", "group", "describe", "events", "g")
	if !regexp.MustCompile(`(?m)^CONSUMER +PROCESS +SINCE +SEEN +LEASES +HOLDS +OLDEST\n\S+ +\S+:` + fmt.Sprint(cmd.Process.Pid) + ` +\S+Z +\S+Z +1 +3 +\S+Z$`).MatchString(shown) {
		t.Errorf("describe gave\n%s", shown)
	}

	if got := c.ok("", "group", "pause", "events", "g"); got != "group \"g\" of topic \"events\" is paused, with 1 lease out\n" {
		t.Errorf("pause gave %q", got)
	}
	if got := c.ok("", "group", "pause", "events", "g"); got != "group \"g\" of topic \"events\" was paused before, with 1 lease out\n" {
		t.Errorf("pause, again, gave %q", got)
	}
	c.fails(exitFailed, "", strings.Fields("group alter events g --shards 8"), "A consumer still holds a lease", `"weir group pause", and wait until "weir group describe" shows no lease`)
	c.ok("4\n", "produce", "events", "--key", "k")
	if err := os.WriteFile(gate, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	eventually(t, "what was held is acknowledged", func() bool { return c.group("events", "g")["leases"] == 0.0 })
	if g := c.group("events", "g"); g["committed"] != 3.0 || g["paused_at"] == nil {
		t.Errorf("the paused group is %v", g)
	}
	altered := c.objects(c.ok("", strings.Fields("group alter events g --shards 8 --header a=1 --max-attempts 3 --output json")...))[0]
	if altered["shards"] != 8.0 || altered["max_attempts"] != 3.0 || altered["key_prefix"] != "k" || fmt.Sprint(altered["headers"]) != "map[a:1]" {
		t.Errorf("altered to %v", altered)
	}
	altered = c.objects(c.ok("", "group", "alter", "events", "g", "--key-prefix", "", "--no-headers", "--output", "json"))[0]
	if altered["shards"] != 8.0 || altered["key_prefix"] != nil || altered["headers"] != nil {
		t.Errorf("altered to %v", altered)
	}

	if got := c.ok("", "group", "rename", "events", "g", "h"); got != "group \"g\" of topic \"events\" is now \"h\"\n" {
		t.Errorf("rename gave %q", got)
	}
	rest, err := io.ReadAll(out)
	if err != nil {
		t.Fatal(err)
	}
	if code := c.code(cmd.Wait()); code != exitFailed || !strings.Contains(errs.String(), "group 'g' does not exist") || string(rest) != "begins\nbegins\n" {
		t.Errorf("the consumer ended with code %d, wrote %q, said\n%s", code, rest, errs.String())
	}
	if got := c.ok("", "group", "resume", "events", "h"); got != "group \"h\" of topic \"events\" is resumed, with 0 leases out\n" {
		t.Errorf("resume gave %q", got)
	}
	if got := c.ok("", "group", "resume", "events", "h"); got != "group \"h\" of topic \"events\" was not paused, with 0 leases out\n" {
		t.Errorf("resume, again, gave %q", got)
	}
	if got := c.objects(c.ok("", "consume", "events", "h", "--until-idle")); len(got) != 1 || got[0]["payload"] != 4.0 {
		t.Errorf("under the new name came %v", got)
	}
	c.fails(exitFailed, "", strings.Fields("group alter events h --shards 4"), "It is not paused", "weir group pause")
}

func TestProduceFlags(t *testing.T) {
	c := newCLI(t)
	c.ok("", "topic", "create", "events")
	c.ok("1\n", strings.Fields("produce events --deliver-at 2099-01-31T12:00:00+02:00 --priority 7 --timeout 90s")...)
	c.ok("2\n", strings.Fields("produce events --delay 36h --priority -3")...)
	c.ok("3\n", strings.Fields("produce events --atomic --delay 1h")...)
	conn, err := pgx.Connect(t.Context(), c.dsn)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.Background())
	rows, err := conn.Query(t.Context(), `
		select concat_ws(' ',
			case when deliver_at > '2090-01-01' then (deliver_at at time zone 'UTC')::text
				else round(extract(epoch from deliver_at - produced_at)) || ' s' end,
			coalesce(priority::text, '-'), coalesce(timeout::text, '-'))
		from weir.log_1
		order by id`)
	if err != nil {
		t.Fatal(err)
	}
	got, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if want := []string{"2099-01-31 10:00:00 7 00:01:30", "129600 s -3 -", "3600 s - -"}; err != nil || !slices.Equal(got, want) {
		t.Errorf("stored %q, %v; want %q", got, err, want)
	}

	// Keys: a second time, what is there already is left out.
	c.ok("", "topic", "create", "payments")
	in := `{"p":{"id":1}}` + "\n" + `{"p":{"id":"two"}}` + "\n" + `{"p":{"id":1}}` + "\n"
	if got := c.ok(in, "produce", "payments", "--idempotency-field", "p.id"); got != "stored 2 messages in payments, ids 1 to 2; left out 1 duplicate\n" {
		t.Errorf("it said %q", got)
	}
	if got := c.ok(in, "produce", "payments", "--idempotency-field", "p.id", "--atomic"); got != "stored 0 messages in payments; left out 3 duplicates\n" {
		t.Errorf("it said %q", got)
	}
	for _, want := range []map[string]any{
		{"topic": "payments", "stored": 1.0, "first_id": 3.0, "last_id": 3.0},
		{"topic": "payments", "stored": 0.0, "duplicates": 1.0},
	} {
		if got := c.objects(c.ok("4\n", "produce", "payments", "--idempotency-key", "k", "--output", "json"))[0]; !maps.Equal(got, want) {
			t.Errorf("the result is %v, want %v", got, want)
		}
	}
	c.fails(exitFailed, "5\n6\n", []string{"produce", "payments", "--idempotency-key", "l"}, `stdin:2 was refused: --idempotency-key is for one message`, "no message was stored")
	c.fails(exitFailed, `{"p":1}`+"\n", []string{"produce", "payments", "--idempotency-field", "p.id"}, `stdin:1 was refused: it has no field p.id for the idempotency key`)
	c.fails(exitFailed, `{"p":"`+strings.Repeat("x", 201)+`"}`+"\n", []string{"produce", "payments", "--idempotency-field", "p"}, `stdin:1 was refused: .*idempotency key is 201 characters`)
	c.fails(exitFailed, `{"k":"`+strings.Repeat("x", 1025)+`"}`+"\n", []string{"produce", "payments", "--key-field", "k"}, `stdin:1 was refused: .*key is 1025 bytes`)

	for _, at := range []string{"tomorrow", "2030-01-31", "2030-01-31T12:00:00", "2030-01-31 12:00:00Z", "2030-01-31T12:00:00 Europe/Berlin", "2030-01-31T12:00:00+25:00", "2030-02-30T12:00:00Z", "10000-01-01T00:00:00Z"} {
		c.fails(exitUsage, "1\n", []string{"produce", "events", "--deliver-at", at}, `--deliver-at is "`+regexp.QuoteMeta(at)+`", it must be a time with its zone`)
	}
	for flags, pattern := range map[string]string{
		"--deliver-at 2030-01-31T12:00:00Z --delay 1s": "--deliver-at and --delay are both given",
		"--delay -1s":           "--delay is -1s, it must be from 0s to 87600h",
		"--delay 87601h":        "--delay is 87601h",
		"--priority 11":         "--priority is 11, it must be from -10 to 10",
		"--timeout 0":           "--timeout is 0s, it must be from 1ms to 168h",
		"--timeout 169h":        "--timeout is 169h",
		"--idempotency-key=":    "--idempotency-key has 0 characters",
		"--idempotency-field=.": `--idempotency-field is "\."`,
		"--idempotency-key a --idempotency-field b": "both given",
	} {
		c.fails(exitUsage, "1\n", append([]string{"produce", "events"}, strings.Fields(flags)...), pattern)
	}
	if n := len(c.objects(c.ok("", "tail", "payments", "--output", "json"))); n != 3 {
		t.Errorf("%d payments are stored, want 3", n)
	}
}

func TestTopicOptions(t *testing.T) {
	c := newCLI(t)
	created := c.objects(c.ok("", strings.Fields("topic create events --retention-age 7d --retention-bytes 10GB --drop-unread --segment-size 5000 --idempotency-ttl 1d12h --output json")...))[0]
	for name, want := range map[string]any{
		"retention_age": "7d", "retention_bytes": float64(10 << 30), "drop_unread": true, "segment_size": 5000.0, "messages": 0.0,
	} {
		if created[name] != want {
			t.Errorf("created with %s %v, want %v", name, created[name], want)
		}
	}
	c.ok("1\n2\n3\n", "produce", "events")
	if got := c.ok("", "topic", "list"); !regexp.MustCompile(`(?m)^events  json +3 +[03] +3  [\d.]+kB +\d\S+Z  7d, 10GB, unread too +\d +0  \S+Z$`).MatchString(got) {
		t.Errorf("the list is\n%s", got)
	}
	described := c.ok("", "topic", "describe", "events")
	for _, line := range []string{`messages: +about 3`, `size: +[\d.]+kB`, `oldest: +\d\S+Z`, `retention: +7d, 10GB, unread too`} {
		if !regexp.MustCompile(`(?m)^` + line + `$`).MatchString(described) {
			t.Errorf("%q is not in\n%s", line, described)
		}
	}
	if got := c.ok("", strings.Fields("topic alter events --retention-age 36h --no-retention-bytes --drop-unread=false")...); got != "topic \"events\" was altered, retention: 1d12h\n" {
		t.Errorf("alter gave %q", got)
	}
	altered := c.objects(c.ok("", strings.Fields("topic alter events --no-retention-age --retention-bytes 1048576 --output json")...))[0]
	if altered["retention_age"] != nil || altered["retention_bytes"] != 1048576.0 || altered["drop_unread"] != nil || altered["segment_size"] != 5000.0 {
		t.Errorf("altered to %v", altered)
	}

	for _, flags := range []string{
		"--retention-age 0", "--retention-age 0d", "--retention-age -1h", "--retention-age 500ms", "--retention-age 40000d",
		"--retention-age soon", "--retention-age 1h1d", "--retention-bytes 0", "--retention-bytes -1", "--retention-bytes 10X",
		"--retention-bytes 1.5G", "--retention-bytes 9000000000G", "--idempotency-ttl 366d", "--tombstone-ttl -1s", "--segment-size 0",
		"--segment-size 999", "--segment-size 1000000001",
	} {
		name := strings.Fields(flags)[0]
		for _, command := range []string{"create bad", "alter events"} {
			c.fails(exitUsage, "", strings.Fields("topic "+command+" "+flags), name, `it must be|no length of time|no size|more than 100 years|more bytes`)
		}
	}
	c.fails(exitUsage, "", strings.Fields("topic create bad --tombstone-ttl 1d"), "--compact")
	c.fails(exitUsage, "", strings.Fields("topic alter events --retention-age 1d --no-retention-age"), "not both")
	c.fails(exitUsage, "", strings.Fields("topic alter events"), "nothing to change")
	c.fails(exitFailed, "", strings.Fields("topic alter nope --retention-age 1d"), "weir topic create")
	c.fails(exitFailed, "", strings.Fields("topic create events --compact"), "exists and is not compacted")
	if got := len(c.objects(c.ok("", "topic", "list", "--output", "json"))); got != 1 {
		t.Errorf("there are %d topics, want one", got)
	}

	for text, want := range map[string]int64{"1": 1, "512": 512, "1k": 1 << 10, "3KB": 3 << 10, "7MiB": 7 << 20, "2T": 2 << 40, "9B": 9} {
		var s sizeFlag
		if err := s.Set(text); err != nil || int64(s) != want {
			t.Errorf("%s is %d, %v, want %d", text, s, err, want)
		}
	}
	for text, want := range map[string]string{"168h": "7d", "90m": "1h30m", "1d90s": "1d1m30s", "3600s": "1h", "1h5s": "1h0m5s", "20m": "20m"} {
		var l lengthFlag
		if err := l.Set(text); err != nil || l.String() != want {
			t.Errorf("%s is %s, %v, want %s", text, l.String(), err, want)
		}
	}
}

func TestTopicRenameAndDrop(t *testing.T) {
	c := newCLI(t)
	c.ok("", "topic", "create", "events")
	c.ok("", "topic", "create", "orders")
	c.ok("", "group", "create", "events", "audit")
	c.ok("1\n", "produce", "events")
	c.fails(exitUsage, "", []string{"topic", "rename", "events", "orders"}, "topic 'orders' exists")
	c.fails(exitUsage, "", []string{"topic", "rename", "events", ""}, "new")
	c.fails(exitFailed, "", []string{"topic", "rename", "nope", "other"}, "weir topic create")
	if got := c.ok("", "topic", "rename", "events", "logs"); got != "topic \"events\" is now \"logs\"\n" {
		t.Errorf("rename gave %q", got)
	}
	if got := c.ok("", "tail", "logs"); got != "1\n" {
		t.Errorf("under the new name are %q", got)
	}

	cmd := c.command("consume", "logs", "audit")
	var errs bytes.Buffer
	cmd.Stderr = &errs
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the consumer is there", func() bool {
		list := c.group("logs", "audit")["consumers"].([]any)
		return len(list) == 1 && list[0].(map[string]any)["started_at"] != nil
	})
	c.fails(exitFailed, "", []string{"topic", "drop", "logs", "--yes"}, "group 'audit' is live", "Its consumer .* runs or holds messages", "--force drops it all the same")
	if got := c.ok("", "tail", "logs"); got != "1\n" {
		t.Errorf("after the refusal there are %q", got)
	}
	if got := c.ok("", "topic", "drop", "logs", "--yes", "--force"); got != "topic \"logs\" was dropped\n" {
		t.Errorf("drop gave %q", got)
	}
	if code := c.code(cmd.Wait()); code != exitFailed || !strings.Contains(errs.String(), "topic 'logs' does not exist") {
		t.Errorf("the consumer ended with code %d, said\n%s", code, errs.String())
	}
	c.fails(exitFailed, "", []string{"tail", "logs"}, "weir topic create")
}

func TestCurrentAndDeleteKey(t *testing.T) {
	c := newCLI(t)
	c.ok("", strings.Fields("topic create customers --compact --tombstone-ttl 30d")...)
	c.ok(`{"k":"ada","n":1}`+"\n"+`{"k":"bob","n":2}`+"\n"+`{"k":"ada","n": 3}`+"\n", "produce", "customers", "--key-field", "k")
	if got := c.ok("", "topic", "current", "customers", "ada"); got != `{"k":"ada","n": 3}`+"\n" {
		t.Errorf("current gave %q", got)
	}
	m := c.objects(c.ok("", "topic", "current", "customers", "ada", "--output", "json"))[0]
	if m["id"] != 3.0 || m["key"] != "ada" || fmt.Sprint(m["payload"]) != "map[k:ada n:3]" {
		t.Errorf("current is %v", m)
	}
	c.fails(exitFailed, "", []string{"topic", "current", "customers", "eve"}, `no message of key "eve"`)
	c.fails(exitFailed, "", []string{"topic", "current", "nope", "eve"}, "weir topic create")
	c.ok("", "topic", "create", "events")
	c.fails(exitUsage, "", []string{"topic", "current", "events", "eve"}, "topic 'events' is not compacted")
	c.fails(exitFailed, "1\n", []string{"produce", "customers"}, "each of its messages needs a key")

	// Of a dead letter, too.
	c.ok("", "group", "create", "customers", "mail", "--max-attempts", "1")
	c.ok("", "consume", "customers", "mail", "--exec", "false", "--until-idle")
	c.fails(exitUsage, "", []string{"topic", "delete-key", "customers", "ada"}, "give --yes")
	if got := c.ok("", "topic", "delete-key", "customers", "ada", "--yes"); got != "2 messages of key \"ada\" removed from topic \"customers\"\n" {
		t.Errorf("delete-key gave %q", got)
	}
	if r := c.objects(c.ok("", "topic", "delete-key", "customers", "ada", "--yes", "--output", "json"))[0]; r["deleted"] != 0.0 || r["key"] != "ada" {
		t.Errorf("delete-key, again, gave %v", r)
	}
	if got := c.ok("", "tail", "customers"); got != `{"k":"bob","n":2}`+"\n" {
		t.Errorf("left are %q", got)
	}
	if got := c.objects(c.ok("", "dead", "list", "customers", "mail", "--output", "json")); len(got) != 1 || got[0]["key"] != "bob" {
		t.Errorf("the dead letters are %v", got)
	}
	c.fails(exitFailed, "", []string{"topic", "current", "customers", "ada"}, `no message of key "ada"`)
	c.fails(exitFailed, "", []string{"topic", "delete-key", "nope", "ada", "--yes"}, "weir topic create")
}

func TestMaintain(t *testing.T) {
	c := newCLI(t)
	c.ok("", strings.Fields("topic create events --segment-size 1000 --retention-bytes 1")...)
	c.ok("", "group", "create", "events", "audit")
	c.ok(strings.Repeat("1\n", 2500), "produce", "events")
	c.ok("", "tail", "events") // until they are settled
	actions := func(text string) (list []string) {
		for _, o := range c.objects(text) {
			if o["topic"] != "events" || o["detail"] == nil {
				t.Errorf("a piece of upkeep is %v", o)
			}
			list = append(list, o["action"].(string))
		}
		return list
	}
	if got := actions(c.ok("", "maintain", "--once", "--output", "json")); !slices.Contains(got, "sealed") || slices.Contains(got, "emptied") {
		t.Errorf("with a group that has handled nothing it did %v", got)
	}
	c.ok("", "consume", "events", "audit", "--until-idle")

	if got := c.ok("", "maintain", "status"); got != "maintenance is not suspended\n" {
		t.Errorf("status gave %q", got)
	}
	if got := c.ok("", "maintain", "suspend"); got != "maintenance is suspended\n" {
		t.Errorf("suspend gave %q", got)
	}
	if got := c.ok("", "maintain", "suspend"); got != "maintenance was suspended before\n" {
		t.Errorf("suspend, again, gave %q", got)
	}
	if o := c.objects(c.ok("", "maintain", "status", "--output", "json"))[0]; o["suspended"] != true || o["suspended_at"] == nil {
		t.Errorf("status is %v", o)
	}
	if _, stdout, stderr := c.run("", "maintain", "--once"); stdout != "" || !strings.Contains(stderr, "maintenance is suspended since") {
		t.Errorf("suspended it did %q, said %q", stdout, stderr)
	}

	// It goes on until it is interrupted, here with what becomes due when it is resumed.
	cmd := c.command("maintain")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	var errs bytes.Buffer
	cmd.Stderr = &errs
	if o := c.objects(c.ok("", "maintain", "resume", "--output", "json"))[0]; o["suspended"] != false {
		t.Errorf("resume gave %v", o)
	}
	if got := c.ok("", "maintain", "resume"); got != "maintenance was not suspended\n" {
		t.Errorf("resume, again, gave %q", got)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(out)
	said := ""
	for strings.Count(said, "events: dropped, segment ") < 2 && lines.Scan() {
		said += lines.Text() + "\n"
	}
	if strings.Count(said, "events: dropped, segment ") != 2 { // the consumer's client may have emptied them before
		t.Errorf("it did\n%s", said)
	}
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if code := c.code(cmd.Wait()); code != exitOK {
		t.Errorf("exit code %d\n%s", code, errs.String())
	}
	if got := len(strings.Split(c.ok("", "tail", "events"), "\n")) - 1; got != 500 {
		t.Errorf("%d messages are left, want 500", got)
	}
	if got := c.ok("", "maintain", "--once"); got != "" {
		t.Errorf("with nothing due it did %q", got)
	}

	// A reader of the segment is in the way, for longer than it waits.
	c.ok(strings.Repeat("1\n", 1000), "produce", "events")
	c.ok("", "consume", "events", "audit", "--until-idle")
	c.ok("", "tail", "events")
	ctx := context.Background()
	conn, err := pgx.Connect(ctx, c.dsn)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close(ctx) }()
	if _, err := conn.Exec(ctx, "begin; lock table weir.log_1_3 in access share mode"); err != nil {
		t.Fatal(err)
	}
	stdout, _ := c.fails(exitFailed, "", []string{"maintain", "--once"}, "something is still due, but a transaction holds a lock")
	if strings.Count(stdout, "postponed") != 1 || strings.Contains(stdout, "emptied") {
		t.Errorf("with a reader in the way it did %q", stdout)
	}
	if _, err := conn.Exec(ctx, "commit"); err != nil {
		t.Fatal(err)
	}
	if got := c.ok("", "maintain", "--once"); !strings.Contains(got, "events: emptied, segment 3") {
		t.Errorf("without it it did %q", got)
	}
	c.fails(exitUsage, "", []string{"maintain", "now"}, "an argument too many")
}
