package examples_test

import (
	"bufio"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/weirhq/weir"
	"github.com/weirhq/weir/internal/pgtest"
)

func TestMain(m *testing.M) { os.Exit(pgtest.Main(m)) }

// build compiles an example.
func build(t *testing.T, name string) (binary string) {
	t.Helper()
	binary = filepath.Join(t.TempDir(), name)
	out, err := exec.Command("go", "build", "-o", binary, "./"+name).CombinedOutput()
	if err != nil {
		t.Fatalf("go build ./%s: %v\n%s", name, err, out)
	}
	return binary
}

// command gives an example that works on a database. It is ended after a minute.
func command(t *testing.T, binary, dsn string) *exec.Cmd {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	t.Cleanup(cancel)
	cmd := exec.CommandContext(ctx, binary)
	cmd.Env = append(os.Environ(), "WEIR_DSN="+dsn)
	cmd.Stderr = os.Stderr
	return cmd
}

// drained waits until a group is done with all there is.
func drained(t *testing.T, dsn, topic, group string) {
	t.Helper()
	client, err := weir.Open(t.Context(), dsn, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		g, err := client.Group(t.Context(), topic, group)
		if err != nil {
			t.Fatal(err)
		}
		if g.Lag == 0 && g.Leases == 0 && g.Retrying == 0 && g.Dead == 0 {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("group %s of topic %s is not done: %+v", group, topic, g)
		}
	}
}

func TestHello(t *testing.T) {
	dsn := pgtest.Shared(t).Database(t)
	cmd := command(t, build(t, "hello"), dsn)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil || line != "\"hello\"\n" {
		t.Errorf("it printed %q (%v)", line, err)
	}
	drained(t, dsn, "greetings", "printer")
	// It would go on.
	if err := cmd.Process.Kill(); err != nil {
		t.Error(err)
	}
	_ = cmd.Wait()
}

func TestOutbox(t *testing.T) {
	dsn := pgtest.Shared(t).Database(t)
	binary := build(t, "outbox")
	out, err := command(t, binary, dsn).Output()
	want := "bob: refused: no credit\nada: order confirmed\neve: order confirmed\n"
	if err != nil || string(out) != want {
		t.Errorf("it printed %q (%v), want %q", out, err, want)
	}
	drained(t, dsn, "orders", "mail")
	// A second time: everything exists already.
	out, err = command(t, binary, dsn).Output()
	if err != nil || strings.Count(string(out), "confirmed") != 2 {
		t.Errorf("the second time it printed %q (%v)", out, err)
	}
}

// TestExamples runs those that end by themselves, and compares what they print.
func TestExamples(t *testing.T) {
	for name, want := range map[string]string{
		"projection": `balances
  ada: 14500 cents in 10 entries
  bob: 15500 cents in 10 entries
  eve: 16500 cents in 10 entries
built again
  ada: 14500 cents in 10 entries
  bob: 15500 cents in 10 entries
  eve: 16500 cents in 10 entries
`,
		"replay": `first: 18 degrees in the cellar
first: 19 degrees in the cellar
first: 20 degrees in the cellar
since the second: 19 degrees in the cellar
since the second: 20 degrees in the cellar
the group was at 3
all: 18 degrees in the cellar
all: 19 degrees in the cellar
all: 20 degrees in the cellar
read: 20
`,
		"deadletters": `ada: printed
dead: bob, attempt 1: nothing is on it
dead: eve, attempt 2: no paper
dead: fay, attempt 1: decode payload: json: cannot unmarshal number into Go value of type string
redriven: 1
eve: printed
removed: 2
`,
		"compacted": `bolt costs 45 cents
screw costs 13 cents
current bolt: true {"sku":"bolt","cents":45}
current nail: false 
`,
	} {
		t.Run(name, func(t *testing.T) {
			out, err := command(t, build(t, name), pgtest.Shared(t).Database(t)).Output()
			if err != nil || string(out) != want {
				t.Errorf("it printed\n%s(%v), want\n%s", out, err, want)
			}
		})
	}
}

func TestOrderPerKey(t *testing.T) {
	out, err := command(t, build(t, "orderperkey"), pgtest.Shared(t).Database(t)).Output()
	want := "order-1: placed, paid, packed, sent\norder-2: placed, paid, packed, sent\n" +
		"order-3: placed, paid, packed, sent\norder-4: placed, paid, packed, sent\n"
	// Whether the others were done before order-2 went on depends on the machine.
	if err != nil || !strings.HasPrefix(string(out), want) {
		t.Errorf("it printed %q (%v), want %q", out, err, want)
	}
}

func TestJobs(t *testing.T) {
	out, err := command(t, build(t, "jobs"), pgtest.Shared(t).Database(t)).Output()
	if err != nil {
		t.Fatal(err)
	}
	// Retries of different jobs overtake each other; a job's own lines stay in order.
	lines := strings.Split(strings.TrimSuffix(string(out), "\n"), "\n")
	for _, want := range [][]string{
		{"password mail, attempt 1: done", "import, attempt 1: failed", "import, attempt 2: done"},
		{"import, attempt 1: failed", "monthly report, attempt 1: done", "reminder, attempt 1: done"},
		{"thumbnail, attempt 1: handler exceeded its time limit", "thumbnail, attempt 2: done"},
		{"fax, attempt 1: failed", "fax, attempt 2: failed", "fax, attempt 3: failed"},
	} {
		at := -1
		for _, line := range want {
			next := slices.Index(lines, line)
			if next <= at {
				t.Errorf("line %q is missing, or comes too early:\n%s", line, out)
			}
			at = next
		}
	}
	if len(lines) != 11 || lines[0] != "password mail, attempt 1: done" || lines[10] != "1 dead" {
		t.Errorf("it printed\n%s", out)
	}
}

// TestReadmeSession types what README shows of a first session, but for the server, which is the tests' own, and compares the answers.
func TestReadmeSession(t *testing.T) {
	text, err := os.ReadFile("../README.md")
	if err != nil {
		t.Fatal(err)
	}
	_, session, found := strings.Cut(string(text), "```text\n$ make install")
	session, _, closed := strings.Cut(session, "```\n")
	if !found || !closed {
		t.Fatal("README.md shows no session")
	}
	bin := t.TempDir()
	if out, err := exec.Command("go", "build", "-o", filepath.Join(bin, "weir"), "../cmd/weir").CombinedOutput(); err != nil {
		t.Fatalf("go build ../cmd/weir: %v\n%s", err, out)
	}
	dsn := pgtest.Shared(t).Database(t)
	client, err := weir.Open(t.Context(), dsn, &weir.Options{Migrate: true}) // as weir dev does
	if err != nil {
		t.Fatal(err)
	}
	client.Close()
	produced := regexp.MustCompile(`"produced_at":"[^"]*"`)
	typed := 0
	for _, part := range strings.Split(session, "\n$ ")[1:] {
		line, answer, _ := strings.Cut(part, "\n")
		line, _, _ = strings.Cut(line, "  #")
		if strings.HasPrefix(line, "weir dev") || strings.HasPrefix(line, "export ") {
			continue
		}
		typed++
		want := strings.Split(strings.TrimSpace(answer), "\n")
		cmd := command(t, "sh", dsn)
		cmd.Args = []string{"sh", "-c", strings.Replace(line, "weir consume", "exec weir consume", 1)}
		cmd.Env = append(cmd.Env, "PATH="+bin+string(os.PathListSeparator)+os.Getenv("PATH"))
		pipe, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		cmd.Stderr = cmd.Stdout
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		var got []string
		for answers := bufio.NewScanner(pipe); answers.Scan(); {
			got = append(got, strings.TrimRight(produced.ReplaceAllString(answers.Text(), `"produced_at":"..."`), " "))
			if strings.HasPrefix(line, "weir consume") && len(got) == len(want) {
				_ = cmd.Process.Signal(os.Interrupt)
			}
		}
		if err := cmd.Wait(); err != nil || !slices.Equal(got, want) {
			t.Errorf("%s\nprinted\n%s\n(%v), README says\n%s", line, strings.Join(got, "\n"), err, strings.Join(want, "\n"))
		}
	}
	if typed < 4 {
		t.Errorf("README.md shows only %d commands", typed)
	}
}
