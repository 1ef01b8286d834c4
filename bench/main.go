// Command bench runs Weir's benchmarks, each workload on a private PostgreSQL server with durable commits, against the systems that do the
// same work.
//
//	go run . throughput --json throughput.json
//	go run . throughput --peer pgq --peer floor
//	go run . short
//	go run . page
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
//		e.AtLeast("drained", 10_000)
//		e.Target("never delivered", "= 0", lost, lost == 0)
//		return nil
//	}
//
// It says what it did with Parameter, what it measured with Record, once a run, and what it had to reach with AtLeast, AtMost and
// Target. An error means that it could not measure; a target that is missed is not an error. Where a result is wrong (messages were
// lost), it gives the missed target and no figure: the speed of a wrong result is none.
//
// A series that is measured for several cases is called "figure, case": the plots of [Workload].Plots go by that.
//
// Comparisons are interleaved: measure A and B in turn within one run (see rounds), and record the ratio. A system to compare with is a
// [Peer], in a file peer_NAME.go.
package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
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
	// Peers are what it compares Weir with.
	Peers []string
	// Long keeps it out of the short set.
	Long bool
	// Plots are drawn from its result.
	Plots []Plot
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

func main() {
	if folder, ok := os.LookupEnv(natsEnv); ok {
		if err := natsServer(folder); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(exitMissed)
		}
		return
	}
	os.Exit(run(os.Args[1:]))
}

const usage = `usage: go run . WORKLOAD... [--short | --quick] [--json FILE] [--peer NAME]...
       go run . short | full [--json FOLDER] [--peer NAME]...
       go run . page
       go run . --list

short runs each workload but the long ones, with fewer rounds; full runs all. page writes docs/benchmarks.md and its plots from
the results.
`

// arguments are what the command line asks for.
type arguments struct {
	workloads []Workload
	size      Size
	// only are the names given by --peer
	only []string
	// file is what --json names: a folder for several workloads
	file    string
	profile string
}

func run(args []string) int {
	slices.SortFunc(workloads, func(a, b Workload) int { return strings.Compare(a.Name, b.Name) })
	var (
		a     = arguments{size: Full}
		flags = flag.NewFlagSet("bench", flag.ContinueOnError)
		quick = flags.Bool("quick", false, "a smoke run: few and short runs, whose figures mean little")
		half  = flags.Bool("short", false, "half of everything, for figures that are about right")
		list  = flags.Bool("list", false, "list the workloads and peers")
	)
	flags.StringVar(&a.file, "json", "", "write the result to this `file`; of several workloads, to files in this folder")
	flags.StringVar(&a.profile, "profile", "", "write a CPU profile of this program, and what the server did and waited for, to this `folder`")
	flags.Func("peer", "compare with this one only (repeat it for several; weir alone with weir)", func(name string) error {
		if _, ok := peerNamed(name); !ok {
			return fmt.Errorf("there is no such peer; there are: %s", strings.Join(peerNames(), ", "))
		}
		a.only = append(a.only, name)
		return nil
	})
	flags.Usage = func() {
		fmt.Fprint(os.Stderr, usage+"\n")
		printList(os.Stderr)
		flags.PrintDefaults()
	}
	// Flags may stand on either side of the names.
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
	switch {
	case *list:
		printList(os.Stdout)
		return exitPassed
	case len(names) == 0:
		flags.Usage()
		return exitUnknown
	case slices.Equal(names, []string{"page"}):
		if err := writePage("results", "../docs"); err != nil {
			fmt.Fprintf(os.Stderr, "bench: page: %v\n", err)
			return exitMissed
		}
		return exitPassed
	}
	for _, name := range names {
		if name == "short" || name == "full" {
			a.size = Size(name)
			a.workloads = slices.DeleteFunc(slices.Clone(workloads), func(w Workload) bool { return name == "short" && w.Long })
			break
		}
		i := slices.IndexFunc(workloads, func(w Workload) bool { return w.Name == name })
		if i < 0 {
			fmt.Fprintf(os.Stderr, "bench: there is no workload %q; there are:\n", name)
			printList(os.Stderr)
			return exitUnknown
		}
		for _, peer := range a.only {
			if peer != "weir" && !slices.Contains(workloads[i].Peers, peer) {
				fmt.Fprintf(os.Stderr, "bench: %s is not run with %s; it is with: %s\n", name, peer, cmp.Or(strings.Join(workloads[i].Peers, ", "), "none"))
				return exitUnknown
			}
		}
		a.workloads = append(a.workloads, workloads[i])
	}
	switch {
	case *quick:
		a.size = Quick
	case *half:
		a.size = Short
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	return runAll(ctx, a)
}

// runAll runs workloads one after the other, prints each result, and all targets at the end.
func runAll(ctx context.Context, a arguments) (code int) {
	var results []*Result
	for _, w := range a.workloads {
		r, err := measure(ctx, w, a)
		if r != nil {
			if err != nil {
				r.Error = err.Error()
			}
			r.print(os.Stdout)
			results = append(results, r)
			if a.file != "" {
				file := a.file
				if len(a.workloads) > 1 {
					file = filepath.Join(file, w.Name+".json")
				}
				if e := r.write(file); e != nil {
					err = errors.Join(err, e)
				}
			}
		}
		if err != nil {
			fmt.Fprintf(os.Stderr, "bench: %s: %v\n", w.Name, err)
		}
		if err != nil || !r.Passed {
			code = exitMissed
		}
		if ctx.Err() != nil {
			break
		}
	}
	if len(a.workloads) > 1 {
		printTargets(os.Stdout, results)
	}
	return code
}

func peerNames() (names []string) {
	for _, p := range peers {
		names = append(names, p.Name)
	}
	return names
}

func printList(f *os.File) {
	fmt.Fprintln(f, "workloads:")
	for _, w := range workloads {
		fmt.Fprintf(f, "  %-11s %s\n", w.Name, w.Short)
	}
	fmt.Fprintln(f, "peers:")
	for _, p := range peers {
		fmt.Fprintf(f, "  %-11s %s\n", p.Name, p.Short)
	}
}

// measure runs a workload on a server of its own.
func measure(ctx context.Context, w Workload, a arguments) (*Result, error) {
	r := &Result{
		Workload: w.Name, Quick: a.size == Quick, Size: a.size, Started: time.Now().UTC().Truncate(time.Second), Go: runtime.Version(),
		Machine: machine(), Parameters: map[string]any{}, Series: []*Series{}, Targets: []Target{},
	}
	r.Commit, r.Modified = commit()
	if a.profile != "" {
		w.Settings = profiledSettings(w.Settings)
	}
	e, err := newEnv(ctx, w, a.size, a.only, r)
	if err != nil {
		return nil, err
	}
	defer e.close()
	if r.PostgreSQL, r.Settings, err = e.settings(ctx); err != nil {
		return nil, err
	}
	if a.profile != "" {
		stop, err := e.profile(ctx, a.profile, w.Name)
		if err != nil {
			return nil, err
		}
		defer stop()
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
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		return err
	}
	return os.WriteFile(file, append(text, '\n'), 0o644)
}
