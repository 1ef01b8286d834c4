package demo

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/weirhq/weir"
	"github.com/weirhq/weir/internal/history"
	"github.com/weirhq/weir/internal/pgtest"
)

const asConsumer = "WEIR_DEMO_TEST_CONSUMER"

func TestMain(m *testing.M) {
	if os.Getenv(asConsumer) != "" {
		if err := Consume(context.Background(), os.Stdin, os.Stderr); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(pgtest.Main(m))
}

func thisBinary() (*exec.Cmd, error) {
	path, err := os.Executable()
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(path)
	cmd.Env = append(os.Environ(), asConsumer+"=1")
	return cmd, nil
}

// database is one with Weir in it.
func database(t *testing.T) (dsn string, c *weir.Client) {
	t.Helper()
	dsn = pgtest.Shared(t).Database(t)
	c, err := weir.Open(t.Context(), dsn, &weir.Options{Migrate: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return dsn, c
}

// tables are those outside of system schemas that the demo may have left.
func tables(t *testing.T, dsn string) (names []string) {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), dsn)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.Background())
	rows, err := conn.Query(t.Context(), `select relname::text from pg_class where relkind in ('r', 'p') and (relname like 'log\_%' or relname like 'weir\_demo%')`)
	if err == nil {
		names, err = pgx.CollectRows(rows, pgx.RowTo[string])
	}
	if err != nil {
		t.Fatal(err)
	}
	return names
}

func folders(t *testing.T) []string {
	t.Helper()
	list, err := filepath.Glob(filepath.Join(os.TempDir(), "weir-demo-*"))
	if err != nil {
		t.Fatal(err)
	}
	return list
}

func TestDemo(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	dsn, _ := database(t)
	var out bytes.Buffer
	v, err := Run(t.Context(), Options{DSN: dsn, For: 4 * time.Second, Rate: 500, Seed: 7, Out: &out, Consumer: thisBinary})
	v.Print(&out, &out)
	t.Logf("\n%s", out.String())
	if err != nil {
		t.Fatal(err)
	}
	if !v.OK || v.Lost != 0 || v.Phantom != 0 || !v.Drained || v.EndedEarly {
		t.Errorf("verdict is %+v", v)
	}
	if v.Produced < 500 || v.RolledBack == 0 || v.RolledBackTransactions == 0 {
		t.Errorf("produced %d, rolled back %d: too few", v.Produced, v.RolledBack)
	}
	if v.HeldOpen == 0 || v.LongestHeldSeconds < 0.2 {
		t.Errorf("%d transactions held open, for up to %.3f s", v.HeldOpen, v.LongestHeldSeconds)
	}
	if len(v.Groups) != 3 {
		t.Fatalf("%d groups", len(v.Groups))
	}
	for _, g := range v.Groups {
		if g.Handled != v.Produced || g.LongestDelaySeconds <= 0 {
			t.Errorf("group %s handled %d of %d, longest delay %.3f s", g.Group, g.Handled, v.Produced, g.LongestDelaySeconds)
		}
	}
	taken := slices.ContainsFunc(v.Kills, func(k Kill) bool { return k.TakenOver && k.Held > 0 })
	if !taken || v.Groups[0].Redelivered == 0 && v.Kills[0].Held == 0 {
		t.Errorf("no takeover: %+v, redelivered %d", v.Kills, v.Groups[0].Redelivered)
	}
	if v.Naive.Skipped == 0 || v.Naive.Read+v.Naive.Skipped != v.Produced {
		t.Errorf("the naive reader read %d and skipped %d of %d", v.Naive.Read, v.Naive.Skipped, v.Produced)
	}
	text := strings.TrimSpace(out.String())
	if !strings.HasSuffix(text, "\nlost 0") {
		t.Errorf("last line is %q", text[strings.LastIndexByte(text, '\n')+1:])
	}
	for _, want := range []string{"held open", "killed (SIGKILL)", "taken over"} {
		if !strings.Contains(text, want) {
			t.Errorf("no event with %q", want)
		}
	}
	if left := tables(t, dsn); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
	if left := folders(t); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}

// A message that one group has not handled is found, although every counter of the run says otherwise.
func TestDemoLoss(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	dsn, _ := database(t)
	var out bytes.Buffer
	v, err := Run(t.Context(), Options{DSN: dsn, For: time.Second, Rate: 200, Out: &out, Consumer: thisBinary, tamper: func(folder string) error {
		path := filepath.Join(folder, "audit.ndjson")
		events, err := readRecord(path)
		if err != nil {
			return err
		}
		victim := events[len(events)/2].ID
		events = slices.DeleteFunc(events, func(e history.Event) bool { return e.ID == victim })
		var b bytes.Buffer
		if err := history.Write(&b, events); err != nil {
			return err
		}
		return os.WriteFile(path, b.Bytes(), 0o600)
	}})
	if err != nil {
		t.Fatal(err)
	}
	v.Print(&out, &out)
	if v.OK || v.Lost != 1 || v.Groups[2].Lost != 1 || v.Groups[2].Handled != v.Produced-1 {
		t.Errorf("verdict is %+v", v)
	}
	if !strings.HasSuffix(out.String(), "\nlost 1\n") {
		t.Errorf("output is\n%s", out.String())
	}
}

// An interrupt ends the producing, not the verdict, and leaves nothing behind; a second one leaves nothing behind either.
func TestDemoInterrupted(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	dsn, _ := database(t)
	for _, twice := range []bool{false, true} {
		ctx, cancel := context.WithTimeout(t.Context(), 1500*time.Millisecond)
		quit := make(chan struct{})
		if twice {
			time.AfterFunc(1500*time.Millisecond, func() { close(quit) })
		}
		var children []*exec.Cmd
		v, err := Run(ctx, Options{DSN: dsn, For: time.Minute, Rate: 300, Quit: quit, Consumer: func() (*exec.Cmd, error) {
			cmd, err := thisBinary()
			children = append(children, cmd)
			return cmd, err
		}})
		cancel()
		if twice {
			if !errors.Is(err, ErrQuit) {
				t.Errorf("error is %v", err)
			}
		} else if err != nil || !v.OK || !v.EndedEarly || v.Produced == 0 || v.Seconds > 10 {
			t.Errorf("verdict is %+v, error is %v", v, err)
		}
		for _, cmd := range children {
			if cmd.ProcessState == nil {
				t.Errorf("process %d was left behind", cmd.Process.Pid)
			}
		}
		if left := append(tables(t, dsn), folders(t)...); len(left) > 0 {
			t.Errorf("left behind: %v", left)
		}
	}
}

// What the verdict must find, each on a record of its own.
func TestWeigh(t *testing.T) {
	type world struct {
		committed []stored
		record    []history.Event
	}
	row := func(id int64, name string) stored {
		key := "k"
		return stored{&id, &name, &key, &id, &name, &key}
	}
	// Three messages, of which the third is rolled back; every group handles the first two.
	sound := func() world {
		rec := history.New()
		for i, name := range []string{"p1-1-0", "p1-1-1", "p1-2-0"} {
			rec.ProduceStarted("t", name, "k")
			if i == 2 {
				rec.ProduceFailed(name)
				continue
			}
			rec.Committing(name)
			rec.Produced("t", int64(i+1), name, "k")
		}
		events := rec.Events()
		later := history.Join(rec.Base()-int64(time.Second), 1)
		for _, g := range groups {
			for i, name := range []string{"p1-1-0", "p1-1-1"} {
				later.HandleStarted(g.name, g.name, int64(i+1), name, "k", 1)
				later.HandleEnded(g.name, g.name, int64(i+1), true)
			}
		}
		return world{[]stored{row(1, "p1-1-0"), row(2, "p1-1-1")}, history.Merge(events, later.Events())}
	}
	for _, c := range []struct {
		name          string
		change        func(w *world)
		lost, phantom int
		problem       string
	}{
		{"sound", func(*world) {}, 0, 0, ""},
		{"not handled", func(w *world) {
			w.record = slices.DeleteFunc(w.record, func(e history.Event) bool { return e.Group == "search" && e.ID == 2 })
		}, 1, 0, ""},
		{"begun and not finished", func(w *world) {
			w.record = slices.DeleteFunc(w.record, func(e history.Event) bool {
				return e.Group == "billing" && e.ID == 1 && e.Kind == history.KindHandleEnded
			})
		}, 1, 0, ""},
		{"a group without a record", func(w *world) {
			w.record = slices.DeleteFunc(w.record, func(e history.Event) bool { return e.Group == "audit" })
		}, 2, 0, ""},
		{"handled what was rolled back", func(w *world) {
			e := w.record[len(w.record)-2]
			e.ID, e.Value, e.Seq, e.Time = 3, "p1-2-0", 1000, e.Time+1000
			w.record = append(w.record, e)
		}, 0, 1, ""},
		{"handled what nobody produced", func(w *world) {
			e := w.record[len(w.record)-2]
			e.ID, e.Value, e.Seq, e.Time = 9, "x-1-0", 1000, e.Time+1000
			w.record = append(w.record, e)
		}, 0, 1, ""},
		{"ledger without message", func(w *world) { w.committed[1].id, w.committed[1].entry = nil, nil }, 0, 0, "ledger entries whose message is missing"},
		{"message without ledger", func(w *world) { w.committed[1].bookedID, w.committed[1].booked = nil, nil }, 0, 0, "whose ledger entry is missing"},
		{"confirmed and gone", func(w *world) { w.committed = w.committed[:1] }, 0, 3, "whose commit was confirmed"},
		{"rolled back and there", func(w *world) { w.committed = append(w.committed, row(3, "p1-2-0")) }, 3, 0, "were rolled back and exist"},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := sound()
			c.change(&w)
			var v Verdict
			v.weigh("t", w.committed, w.record)
			if v.Lost != c.lost || v.Phantom != c.phantom || v.OK != (c.lost == 0 && c.phantom == 0 && c.problem == "") {
				t.Errorf("verdict is %+v", v)
			}
			if text := strings.Join(v.Problems, "; "); c.problem == "" && text != "" || !strings.Contains(text, c.problem) {
				t.Errorf("problems are %q", text)
			}
		})
	}
}

func TestOptions(t *testing.T) {
	for _, o := range []Options{{For: time.Millisecond}, {Rate: -1}, {Producers: 101}, {Rate: 1_000_000, For: time.Hour}} {
		if _, err := Run(t.Context(), o); err == nil {
			t.Errorf("%+v was accepted", o)
		}
	}
}

// The picture fits its terminal, whatever there is to show.
func TestPicture(t *testing.T) {
	f := frame{
		title: "private PostgreSQL 17", stage: "producing", head: 123_456, settled: 120_000, window: 5000, left: 0.5, naive: groupFrame{skipped: 12},
		groups:  []groupFrame{{name: "billing", position: 100, lag: 123_356}, {name: "search", position: 121_000}},
		workers: []worker{{1, true}, {2, false}},
		events:  slices.Repeat([]event{{time.Second, "something"}}, 100),
	}
	for _, size := range [][2]int{{60, 18}, {80, 24}, {200, 60}} {
		list := picture(&f, size[0], size[1])
		if len(list) > size[1] {
			t.Errorf("%d lines on a terminal of %v", len(list), size)
		}
	}
}
