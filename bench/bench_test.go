package main

import (
	"bytes"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/weirhq/weir/internal/pgtest"
)

// The program starts itself as a NATS server: as a test, too.
func TestMain(m *testing.M) {
	if folder, ok := os.LookupEnv(natsEnv); ok {
		if err := natsServer(folder); err != nil {
			os.Exit(exitMissed)
		}
		os.Exit(exitPassed)
	}
	os.Exit(m.Run())
}

// TestSmoke runs each workload for a moment, with all peers that are installed. Figures prove nothing then; that nothing is lost does.
func TestSmoke(t *testing.T) {
	for _, w := range workloads {
		t.Run(w.Name, func(t *testing.T) {
			r, err := measure(t.Context(), w, arguments{size: Quick})
			if err != nil {
				t.Fatal(err)
			}
			if len(r.Series) == 0 {
				t.Error("there are no figures")
			}
			for _, target := range r.Targets {
				if target.Name == "never delivered" && !target.Passed {
					t.Errorf("never delivered: %v", target.Got)
				}
			}
			for _, p := range w.Plots {
				if svg, err := r.draw(p); err != nil || svg == nil {
					t.Errorf("plot %q: %d bytes, %v", p.Title, len(svg), err)
				}
			}
			file := filepath.Join(t.TempDir(), "new", "result.json")
			if err := r.write(file); err != nil {
				t.Fatal(err)
			}
			if _, err := readResult(file); err == nil || !strings.Contains(err.Error(), "smoke") {
				t.Errorf("a smoke run's result is taken for one: %v", err)
			}
		})
	}
}

func TestBadArguments(t *testing.T) {
	for _, args := range [][]string{
		{},
		{"nothing"},
		{"drain", "nothing"},
		{"throughput", "--peer", "nothing"},
		{"drain", "--peer", "pgq"},
		{"drain", "--nothing"},
	} {
		if code := run(args); code != exitUnknown {
			t.Errorf("%q: exit code %d, it is to be %d", args, code, exitUnknown)
		}
	}
}

// TestMissing: what is not installed is named with the line that installs it; it is left out where nobody has asked for it.
func TestMissing(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	server := pgtest.New(t, nil)
	r := &Result{Parameters: map[string]any{}}
	e := &Env{Server: server, result: r, workload: Workload{Peers: []string{"floor", "pgq"}}}
	all, err := e.peers(t.Context())
	if err != nil || len(all) != 2 || r.Parameters["left out, pgq"] == nil {
		t.Errorf("without --peer: %d peers, %v, %v", len(all), r.Parameters, err)
	}
	e.only = []string{"pgq"}
	if _, err := e.peers(t.Context()); err == nil || !strings.Contains(err.Error(), "apt-get install") {
		t.Errorf("with --peer pgq: %v", err)
	}
	e.only = []string{"weir"}
	if all, err := e.peers(t.Context()); err != nil || len(all) != 1 {
		t.Errorf("with --peer weir: %d peers, %v", len(all), err)
	}
	if err := e.extension("no_such_extension"); err == nil || !strings.Contains(err.Error(), "no_such_extension") {
		t.Errorf("a missing extension: %v", err)
	}

	t.Setenv(pgtest.BinEnv, t.TempDir())
	if _, err := measure(t.Context(), workloads[0], arguments{size: Quick}); err == nil || !strings.Contains(err.Error(), "remedy") {
		t.Errorf("without a server: %v", err)
	}
}

// TestTally: what was not delivered is counted, and what was twice.
func TestTally(t *testing.T) {
	a := newTally(5)
	orders := append(a.orders(3), a.orders(3)...)
	if len(orders) != 5 || len(a.orders(3)) != 0 {
		t.Fatalf("%d orders of 5", len(orders))
	}
	a.produced.Store(5)
	for _, i := range []int{4, 0, 4, 2} {
		a.handled(&orders[i])
	}
	if a.lost() != 2 || a.twice.Load() != 1 || len(a.delays(0)) != 3 || len(a.delays(1)) != 2 {
		t.Errorf("%d lost, %d twice, %d delays, %d of them from 1 on", a.lost(), a.twice.Load(), len(a.delays(0)), len(a.delays(1)))
	}
	r := &Result{Parameters: map[string]any{}}
	e := &Env{result: r}
	lost := account{}
	if lost.sound(e, Peer{Name: "weir"}, a) || !lost.sound(e, Peer{Name: "floor", Skips: true}, a) {
		t.Error("a turn that lost messages has a figure, or one that may has none")
	}
	e.Record("consumed, weir", "messages/s", 1)
	lost.close(e)
	if len(r.Series) > 0 || r.Targets[0].Passed {
		t.Errorf("a wrong result has figures: %v, %v", r.Series, r.Targets)
	}
}

// TestTargets: a target is judged by the median.
func TestTargets(t *testing.T) {
	r := &Result{Parameters: map[string]any{}}
	e := &Env{result: r}
	for _, v := range []float64{1, 3, 9} {
		e.Record("rate", "x", v)
	}
	e.AtLeast("rate", 3)
	e.AtLeast("rate", 3.5)
	e.AtMost("rate", 3)
	e.AtMost("rate", 2.5)
	e.AtMost("of a peer that was left out", 1)
	var passed []bool
	for _, target := range r.Targets {
		passed = append(passed, target.Passed)
	}
	if !slices.Equal(passed, []bool{true, false, true, false}) {
		t.Errorf("%v", r.Targets)
	}
}

// TestPage: docs/benchmarks.md and its plots are what the committed results make of them.
func TestPage(t *testing.T) {
	files, err := page("results")
	if err != nil {
		t.Fatal(err)
	}
	present, err := filepath.Glob("../docs/benchmarks/*.svg")
	if err != nil {
		t.Fatal(err)
	}
	if want := len(files) - 1; len(present) != want {
		t.Errorf("docs/benchmarks has %d plots, there are to be %d: go run . page", len(present), want)
	}
	for _, name := range slices.Sorted(maps.Keys(files)) {
		got, err := os.ReadFile(filepath.Join("../docs", name))
		if err != nil || !bytes.Equal(got, files[name]) {
			t.Errorf("docs/%s is not of these results: go run . page (%v)", name, err)
		}
	}
}
