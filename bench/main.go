// Command bench runs Weir's benchmarks, one workload at a time, on a private PostgreSQL server with durable commits.
//
//	go run . drain --json drain.json
//
// # A workload
//
// A workload is one file that registers itself:
//
//	func init() {
//		register(Workload{Name: "drain", Short: "four producers at full speed, one group", Run: drain})
//	}
//
//	func drain(ctx context.Context, e *Env) error {
//		client, _, err := e.Open(ctx, nil) // a new database with Weir in it
//		...
//		e.Parameter("producers", 4)
//		for range e.Runs(5, 1) {
//			...
//			e.Record("drained", "messages/s", rate) // a figure of one run
//		}
//		e.Target("never delivered", "= 0", lost, lost == 0)
//		return nil
//	}
//
// It says what it did with Parameter, what it measured with Record, once a run, and what it had to reach with Target. An
// error means that it could not measure; a target that is missed is not an error. Where a result is wrong (messages were
// lost), it gives the missed target and no figure: the speed of a wrong result is none.
//
// Comparisons are interleaved: measure A and B in turn within one run, and record the ratio.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"
)

// Workload is one benchmark.
type Workload struct {
	// Name is what it is called by: one lower-case word. Short says in a line what it does.
	Name, Short string
	// Settings are settings of its server that differ from those of pgtest.Start. They stand in the result.
	Settings map[string]string
	// Run does it.
	Run func(ctx context.Context, e *Env) error
}

var workloads []Workload

// register makes a workload known. Call it from init.
func register(w Workload) {
	for _, other := range workloads {
		if other.Name == w.Name {
			panic("bench: two workloads are called " + w.Name)
		}
	}
	workloads = append(workloads, w)
}

// Exit codes.
const (
	exitPassed  = 0
	exitMissed  = 1 // a target was missed, or the workload could not measure
	exitUnknown = 2 // bad arguments
)

func main() { os.Exit(run(os.Args[1:])) }

func run(args []string) int {
	slices.SortFunc(workloads, func(a, b Workload) int { return strings.Compare(a.Name, b.Name) })
	flags := flag.NewFlagSet("bench", flag.ContinueOnError)
	quick := flags.Bool("quick", false, "a smoke run: few and short runs, whose figures mean little")
	file := flags.String("json", "", "write the result to this `file`")
	list := flags.Bool("list", false, "list the workloads")
	flags.Usage = func() {
		fmt.Fprintln(os.Stderr, "usage: go run . WORKLOAD [--quick] [--json FILE]\n       go run . --list\n\nworkloads:")
		printList(os.Stderr)
		flags.PrintDefaults()
	}
	// Flags may stand on either side of the workload's name.
	var names []string
	for rest := args; ; {
		if err := flags.Parse(rest); err != nil {
			if errors.Is(err, flag.ErrHelp) {
				return exitPassed
			}
			return exitUnknown
		}
		if rest = flags.Args(); len(rest) == 0 {
			break
		}
		names, rest = append(names, rest[0]), rest[1:]
	}
	if *list {
		printList(os.Stdout)
		return exitPassed
	}
	if len(names) != 1 {
		flags.Usage()
		return exitUnknown
	}
	i := slices.IndexFunc(workloads, func(w Workload) bool { return w.Name == names[0] })
	if i < 0 {
		fmt.Fprintf(os.Stderr, "bench: there is no workload %q; there are:\n", names[0])
		printList(os.Stderr)
		return exitUnknown
	}

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	r, err := measure(ctx, workloads[i], *quick)
	if r != nil {
		if err != nil {
			r.Error = err.Error()
		}
		r.print(os.Stdout)
		if *file != "" {
			if e := r.write(*file); e != nil {
				err = errors.Join(err, e)
			}
		}
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "bench: %s: %v\n", workloads[i].Name, err)
		return exitMissed
	}
	if !r.Passed {
		return exitMissed
	}
	return exitPassed
}

func printList(f *os.File) {
	for _, w := range workloads {
		fmt.Fprintf(f, "  %-10s %s\n", w.Name, w.Short)
	}
}

// measure runs a workload on a server of its own.
func measure(ctx context.Context, w Workload, quick bool) (*Result, error) {
	r := &Result{
		Workload: w.Name, Quick: quick, Started: time.Now().UTC().Truncate(time.Second), Go: runtime.Version(),
		Machine: machine(), Parameters: map[string]any{}, Series: []*Series{}, Targets: []Target{},
	}
	r.Commit, r.Modified = commit()
	e, err := newEnv(ctx, w, quick, r)
	if err != nil {
		return nil, err
	}
	defer e.close()
	if r.PostgreSQL, r.Settings, err = e.settings(ctx); err != nil {
		return nil, err
	}
	began := time.Now()
	err = w.Run(ctx, e)
	r.Seconds = time.Since(began).Round(time.Millisecond).Seconds()
	r.finish(err)
	return r, err
}

func (r *Result) write(file string) error {
	text, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(file, append(text, '\n'), 0o644)
}
