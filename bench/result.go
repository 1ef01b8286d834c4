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
	"time"
)

// Result is what one call of a workload found, as it is written to --json.
type Result struct {
	Workload string    `json:"workload"`
	Quick    bool      `json:"quick"`
	Started  time.Time `json:"started"`
	Seconds  float64   `json:"seconds"`
	// Commit is that of the working tree; Modified says that the tree had changes on top of it.
	Commit     string            `json:"commit"`
	Modified   bool              `json:"modified"`
	Go         string            `json:"go"`
	PostgreSQL string            `json:"postgresql"`
	Settings   map[string]string `json:"settings"`
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
		sorted := slices.Sorted(slices.Values(s.Values))
		n := len(sorted)
		s.Min, s.Max = sorted[0], sorted[n-1]
		s.Median = (sorted[(n-1)/2] + sorted[n/2]) / 2
		if s.Median != 0 {
			s.Spread = (s.Max - s.Min) / s.Median
		}
	}
}

func (r *Result) print(w io.Writer) {
	commit := r.Commit
	if r.Modified {
		commit += " (modified)"
	}
	fmt.Fprintf(w, "%s  PostgreSQL %s, %s, %d CPUs, commit %s\n", r.Workload, r.PostgreSQL, r.Go, r.Machine.CPUs, commit)
	for _, name := range slices.Sorted(maps.Keys(r.Parameters)) {
		fmt.Fprintf(w, "  %-24s %v\n", name, r.Parameters[name])
	}
	for _, s := range r.Series {
		fmt.Fprintf(w, "  %-24s %s %s, median of %d runs from %s to %s (spread %.0f%%)\n",
			s.Name, figure(s.Median), s.Unit, len(s.Values), figure(s.Min), figure(s.Max), 100*s.Spread)
	}
	for _, t := range r.Targets {
		verdict := "pass"
		if !t.Passed {
			verdict = "MISS"
		}
		fmt.Fprintf(w, "  %s  %s %s: %v\n", verdict, t.Name, t.Want, t.Got)
	}
}

// figure writes a number with three significant digits, or all of its whole ones.
func figure(v float64) string {
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
