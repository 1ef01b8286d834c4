package main

import (
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"
)

// Result is what one call of a workload found, as it is written to --json.
type Result struct {
	Workload string    `json:"workload"`
	Quick    bool      `json:"quick"`
	Size     Size      `json:"size,omitempty"`
	Started  time.Time `json:"started"`
	Seconds  float64   `json:"seconds"`
	// Commit is that of the working tree; Modified says that the tree had changes on top of it.
	Commit     string            `json:"commit"`
	Modified   bool              `json:"modified"`
	Go         string            `json:"go"`
	PostgreSQL string            `json:"postgresql"`
	Settings   map[string]string `json:"settings"`
	// Peers are the versions of what was compared with.
	Peers      map[string]string `json:"peers,omitempty"`
	Machine    Machine           `json:"machine"`
	Parameters map[string]any    `json:"parameters"`
	Series     []*Series         `json:"series"`
	Targets    []Target          `json:"targets"`
	// Passed: every target was reached, and nothing prevented the measurement.
	Passed bool   `json:"passed"`
	Error  string `json:"error,omitempty"`
}

// Machine is what the workload ran on.
type Machine struct {
	OS     string `json:"os"`
	Arch   string `json:"arch"`
	CPU    string `json:"cpu"`
	CPUs   int    `json:"cpus"`
	Memory string `json:"memory"`
}

// Series is one figure, measured once a run.
type Series struct {
	Name   string    `json:"name"`
	Unit   string    `json:"unit"`
	Values []float64 `json:"values"`
	Min    float64   `json:"min"`
	Median float64   `json:"median"`
	Max    float64   `json:"max"`
	// Spread is (max - min) / median; 0 for a single run.
	Spread float64 `json:"spread"`
}

// Target is what had to be reached.
type Target struct {
	Name   string `json:"name"`
	Want   string `json:"want"`
	Got    any    `json:"got"`
	Passed bool   `json:"passed"`
}

// finish works out what follows from the figures.
func (r *Result) finish(err error) {
	r.Passed = err == nil
	for _, t := range r.Targets {
		r.Passed = r.Passed && t.Passed
	}
	for _, s := range r.Series {
		s.finish()
	}
}

func (s *Series) finish() {
	sorted := slices.Sorted(slices.Values(s.Values))
	n := len(sorted)
	s.Min, s.Max = sorted[0], sorted[n-1]
	s.Median = (sorted[(n-1)/2] + sorted[n/2]) / 2
	if s.Median != 0 {
		s.Spread = (s.Max - s.Min) / s.Median
	}
}

func (r *Result) print(w io.Writer) {
	commit := r.Commit
	if r.Modified {
		commit += " (modified)"
	}
	fmt.Fprintf(w, "%s  PostgreSQL %s, %s, %d CPUs, commit %s\n", r.Workload, r.PostgreSQL, r.Go, r.Machine.CPUs, commit)
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, name := range slices.Sorted(maps.Keys(r.Parameters)) {
		fmt.Fprintf(table, "  %s\t%v\n", name, r.Parameters[name])
	}
	_ = table.Flush()
	for _, t := range r.tables() {
		fmt.Fprintln(table)
		for _, row := range t {
			fmt.Fprintf(table, "  %s\n", strings.Join(row, "\t"))
		}
	}
	_ = table.Flush()
	fmt.Fprintln(w)
	printTargets(w, []*Result{r})
}

// tables are the figures: one table of the series called "figure, case", a row for each case, and one of the others. A cell is the
// median with its spread.
func (r *Result) tables() (tables [][][]string) {
	var (
		columns []string // figures that have cases, with their units
		cases   []string
		cells   = map[[2]string]string{}
		others  = [][]string{{"figure", "median", "least", "most", "runs"}}
	)
	for _, s := range r.Series {
		name, of, found := strings.Cut(s.Name, ", ")
		if !found {
			others = append(others, []string{
				s.Name, short(s.Median) + " " + s.Unit, short(s.Min), short(s.Max), strconv.Itoa(len(s.Values)),
			})
			continue
		}
		column := name + ", " + s.Unit
		if !slices.Contains(columns, column) {
			columns = append(columns, column)
		}
		if !slices.Contains(cases, of) {
			cases = append(cases, of)
		}
		cell := short(s.Median)
		if len(s.Values) > 1 {
			cell += fmt.Sprintf(" ±%.0f%%", 100*s.Spread/2)
		}
		cells[[2]string{of, column}] = cell
	}
	if len(cases) > 0 {
		table := [][]string{append([]string{""}, columns...)}
		for _, of := range cases {
			row := []string{of}
			for _, column := range columns {
				row = append(row, cells[[2]string{of, column}])
			}
			table = append(table, row)
		}
		tables = append(tables, table)
	}
	if len(others) > 1 {
		tables = append(tables, others)
	}
	return tables
}

// printTargets prints what had to be reached beside what was.
func printTargets(w io.Writer, results []*Result) {
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, r := range results {
		name := ""
		if len(results) > 1 {
			name = r.Workload + ": "
		}
		for _, t := range r.Targets {
			verdict := "pass"
			if !t.Passed {
				verdict = "MISS"
			}
			fmt.Fprintf(table, "  %s\t%s%s\t%s\t%v\n", verdict, name, t.Name, t.Want, t.Got)
		}
		if r.Error != "" {
			fmt.Fprintf(table, "  MISS\t%s%s\t\t\n", name, r.Error)
		}
	}
	_ = table.Flush()
}

// short writes a number with three significant digits, or all of its whole ones.
func short(v float64) string {
	if v >= 100 || v <= -100 || v == 0 {
		return strconv.FormatFloat(v, 'f', 0, 64)
	}
	return strconv.FormatFloat(v, 'g', 3, 64)
}

// commit names the checkout that is measured. A tree without git gives "unknown".
func commit() (hash string, modified bool) {
	out, err := exec.Command("git", "rev-parse", "--short=12", "HEAD").Output()
	if err != nil {
		return "unknown", true
	}
	status, err := exec.Command("git", "status", "--porcelain", "--", "..").Output()
	return strings.TrimSpace(string(out)), err != nil || len(status) > 0
}

func machine() Machine {
	return Machine{
		OS: runtime.GOOS, Arch: runtime.GOARCH, CPUs: runtime.NumCPU(),
		CPU: procField("/proc/cpuinfo", "model name"), Memory: procField("/proc/meminfo", "MemTotal"),
	}
}

// procField reads a line such as "MemTotal:  8 kB"; "unknown" elsewhere than on Linux.
func procField(file, name string) string {
	text, err := os.ReadFile(file)
	if err == nil {
		for line := range strings.Lines(string(text)) {
			key, value, found := strings.Cut(line, ":")
			if found && strings.TrimSpace(key) == name {
				return strings.TrimSpace(value)
			}
		}
	}
	return "unknown"
}
