package torture

import (
	"bytes"
	"context"
	_ "embed"
	"encoding/json"
	"fmt"
	"html/template"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/weirhq/weir/internal/history"
)

// Report is what a torture comes to.
type Report struct {
	// OK: nothing was violated.
	OK   bool   `json:"ok"`
	Seed uint64 `json:"seed"`
	// Broken is the bug that was seeded.
	Broken       string  `json:"broken,omitempty"`
	Server       string  `json:"server"`
	Seconds      float64 `json:"seconds"`
	EndedEarly   bool    `json:"ended_early,omitempty"`
	DrainSeconds float64 `json:"drain_seconds"`

	// Messages were committed; RolledBack were not. Unknown are those whose producer did not learn the outcome, Resolved those of
	// which the ledger told it; what is left, of calls that repeat by themselves and need no ledger, is Unresolved.
	Messages   int `json:"messages"`
	RolledBack int `json:"rolled_back"`
	Unknown    int `json:"unknown"`
	Resolved   int `json:"resolved"`
	Unresolved int `json:"unresolved"`
	// Dead letters are those that handlers gave up. Strays are messages that a handler found under no lease of its own any more.
	Dead   int `json:"dead"`
	Strays int `json:"strays"`
	// Acknowledged leases; Events and Eras were judged.
	Acknowledged int `json:"acknowledged_leases"`
	Events       int `json:"events"`
	Eras         int `json:"eras"`
	Processes    int `json:"processes"`

	Groups      []GroupReport     `json:"groups"`
	FaultCount  int               `json:"fault_count"`
	Faults      []FaultReport     `json:"faults"`
	Unavailable map[string]string `json:"unavailable,omitempty"`

	Violated   map[history.Rule]int `json:"violated,omitempty"`
	Violations []history.Violation  `json:"violations,omitempty"`

	Happened []happened `json:"happened,omitempty"`
	Series   []Moment   `json:"series,omitempty"`
}

// GroupReport is what one group did.
type GroupReport struct {
	Group string `json:"group"`
	Mode  string `json:"mode"`
	// Once: its effects are in the transactions of its acknowledgements.
	Once bool `json:"effectively_once"`
	// Handled counts messages; Redelivered handlings begun, and Again handlings ended well, after a message's first.
	Handled     int `json:"handled"`
	Redelivered int `json:"redelivered"`
	Again       int `json:"again"`
	Effects     int `json:"effects,omitempty"`
	Lost        int `json:"lost"`
	LeasesLost  int `json:"leases_lost"`
	Strays      int `json:"strays"`
}

// FaultReport is what one kind of fault did. Times are in seconds from the end of a fault, the longest of the groups it concerns.
type FaultReport struct {
	Kind  string `json:"kind"`
	What  string `json:"what"`
	Count int    `json:"count"`
	// Failed is the last error of making one.
	Failed string `json:"failed,omitempty"`
	// Resumed is until the next delivery; CaughtUp until all that was produced by the fault's end was handled.
	Resumed  Spread `json:"resumed"`
	CaughtUp Spread `json:"caught_up"`
}

// Spread is what times are like.
type Spread struct {
	Median float64 `json:"median_seconds"`
	Max    float64 `json:"max_seconds"`
}

func spreadOf(list []float64) Spread {
	if len(list) == 0 {
		return Spread{}
	}
	slices.Sort(list)
	return Spread{list[len(list)/2], list[len(list)-1]}
}

// Moment is what was seen at one time.
type Moment struct {
	Second   float64 `json:"second"`
	Produced float64 `json:"produced_per_second"`
	Handled  float64 `json:"handled_per_second"`
	// Lag is that of the groups, in their order.
	Lag [6]int64 `json:"lag"`
}

func (t *torture) newReport(ctx context.Context) *Report {
	r := &Report{
		Seed: t.o.Seed, Broken: t.o.Break, FaultCount: len(t.happened), Unavailable: t.unavailable(), Violated: map[history.Rule]int{},
		Processes: int(t.procs.Load()),
	}
	conn, err := t.pool.Acquire(ctx)
	if err == nil {
		r.Server, _, _ = strings.Cut(conn.Conn().PgConn().ParameterStatus("server_version"), " ")
		r.Server = "PostgreSQL " + r.Server
		conn.Release()
	}
	for _, g := range groups {
		r.Groups = append(r.Groups, GroupReport{Group: g.name, Mode: string(topics[g.topic].mode), Once: g.once})
	}
	for _, k := range kinds {
		if t.active[k.name] {
			r.Faults = append(r.Faults, FaultReport{Kind: k.name, What: k.what, Failed: t.failures[k.name]})
		}
	}
	return r
}

// series thins the samples out to some hundred moments.
func (j *judgement) series() {
	samples := j.t.samples
	step := max(1, len(samples)/600)
	var before sample
	for i := step; i < len(samples); i += step {
		s := samples[i]
		took := float64(s.at-before.at) / 1e6
		if took > 0 {
			j.r.Series = append(j.r.Series, Moment{
				Second: float64(s.at) / 1e6, Produced: max(0, float64(s.produced-before.produced)/took),
				Handled: max(0, float64(s.handled-before.handled)/took), Lag: s.lag,
			})
		}
		before = s
	}
}

func number(n int) string {
	s := fmt.Sprint(n)
	for i := len(s) - 3; i > 0 && s[i-1] != '-'; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}

// Print writes the report for people.
func (r *Report) Print(w io.Writer) {
	p := func(format string, args ...any) { fmt.Fprintf(w, format+"\n", args...) }
	p("%s, seed %d, %.0f s and %.1f s to drain, %d processes", r.Server, r.Seed, r.Seconds, r.DrainSeconds, r.Processes)
	if r.Broken != "" {
		p("with the bug %s", r.Broken)
	}
	p("%s messages, %s rolled back; %s with an unknown outcome, of which the ledger resolved %s", number(r.Messages), number(r.RolledBack),
		number(r.Unknown), number(r.Resolved))
	p("%s events judged in %d parts", number(r.Events), r.Eras)
	p("")
	p("%-14s %-8s %12s %12s %10s %12s %8s", "group", "mode", "handled", "redelivered", "again", "leases lost", "lost")
	for _, g := range r.Groups {
		p("%-14s %-8s %12s %12s %10s %12s %8s", g.Group, g.Mode, number(g.Handled), number(g.Redelivered), number(g.Again), number(g.LeasesLost), number(g.Lost))
	}
	p("")
	p("%-14s %8s %28s %28s", "fault", "times", "deliveries go on: median, max", "caught up: median, max")
	for _, f := range r.Faults {
		p("%-14s %8s %17.3f s %8.3f s %17.1f s %8.1f s", f.Kind, number(f.Count), f.Resumed.Median, f.Resumed.Max, f.CaughtUp.Median, f.CaughtUp.Max)
		if f.Failed != "" && f.Count == 0 {
			p("%-14s could not be made: %s", "", f.Failed)
		}
	}
	p("%-14s %8s", "all", number(r.FaultCount))
	for _, name := range slices.Sorted(maps.Keys(r.Unavailable)) {
		p("%-14s not to be had here: it %s", name, r.Unavailable[name])
	}
	p("")
	shown := map[history.Rule]int{}
	for _, v := range r.Violations {
		if shown[v.Kind]++; shown[v.Kind] <= 3 {
			p("%s", v)
		}
	}
	if r.OK {
		p("no violations")
		return
	}
	text := "violations:"
	for _, rule := range slices.Sorted(maps.Keys(r.Violated)) {
		text += fmt.Sprintf(" %s %d,", rule, r.Violated[rule])
	}
	p("%s", strings.TrimSuffix(text, ","))
}

//go:embed report.html
var page string

// Write writes the report into a folder, as report.json and index.html.
func (r *Report) Write(folder string) error {
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return err
	}
	text, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(folder, "report.json"), append(text, '\n'), 0o644); err != nil {
		return err
	}
	var b bytes.Buffer
	if err := template.Must(template.New("").Funcs(template.FuncMap{"number": number}).Parse(page)).Execute(&b, r.drawn()); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(folder, "index.html"), b.Bytes(), 0o644)
}

// drawing is a report with what its plots are made of.
type drawing struct {
	*Report
	Rate, Lag Plot
	Marks     []Mark
	Rows      []string
	Bars      []Bar
	Rules     []string
}

// Plot is lines over time.
type Plot struct {
	Lines  []Line
	X, Y   []Tick
	Width  int
	Height int
}

// Line is a line of a plot.
type Line struct{ Name, Color, Points string }

// Tick is a mark of an axis.
type Tick struct {
	At   float64
	Text string
}

// Mark is a fault, in the row of its kind.
type Mark struct {
	X, Y, Width float64
	Title       string
}

// Bar is how long a kind of fault took.
type Bar struct {
	Y, Median, Max float64
	Kind, Text     string
}

const plotWidth, plotHeight = 900, 220

var colors = []string{"#1b6ca8", "#d1495b", "#2e8b57", "#b8860b", "#6a4c93", "#444444"}

func (r *Report) drawn() drawing {
	d := drawing{Report: r}
	end := 1.0
	for _, m := range r.Series {
		end = max(end, m.Second)
	}
	plot := func(names []string, value func(m Moment, i int) float64) Plot {
		p := Plot{Width: plotWidth, Height: plotHeight}
		top := 1.0
		for _, m := range r.Series {
			for i := range names {
				top = max(top, value(m, i))
			}
		}
		for i, name := range names {
			var points strings.Builder
			for _, m := range r.Series {
				fmt.Fprintf(&points, "%.1f,%.1f ", m.Second/end*plotWidth, plotHeight-value(m, i)/top*plotHeight)
			}
			p.Lines = append(p.Lines, Line{name, colors[i], points.String()})
		}
		for i := range 5 {
			p.X = append(p.X, Tick{float64(i) / 4 * plotWidth, fmt.Sprintf("%.0f s", float64(i)/4*end)})
			p.Y = append(p.Y, Tick{plotHeight - float64(i)/4*plotHeight, number(int(float64(i) / 4 * top))})
		}
		return p
	}
	d.Rate = plot([]string{"produced a second", "handled a second, by all groups"}, func(m Moment, i int) float64 {
		return []float64{m.Produced, m.Handled}[i]
	})
	var names []string
	for _, g := range r.Groups {
		names = append(names, g.Group)
	}
	d.Lag = plot(names, func(m Moment, i int) float64 { return float64(m.Lag[i]) })
	longest := 0.001
	rows := map[string]float64{}
	for _, f := range r.Faults {
		rows[f.Kind] = float64(len(d.Rows)) * 16
		d.Rows = append(d.Rows, f.Kind)
		longest = max(longest, f.CaughtUp.Max)
	}
	for _, h := range r.Happened {
		d.Marks = append(d.Marks, Mark{
			float64(h.Began) / 1e6 / end * plotWidth, rows[h.Kind], max(1.5, float64(h.Ended-h.Began)/1e6/end*plotWidth),
			fmt.Sprintf("%s at %.1f s %s", h.Kind, float64(h.Began)/1e6, h.Detail),
		})
	}
	for _, f := range r.Faults {
		d.Bars = append(d.Bars, Bar{
			rows[f.Kind], f.CaughtUp.Median / longest * 600, f.CaughtUp.Max / longest * 600, f.Kind,
			fmt.Sprintf("%.1f s, at most %.1f s", f.CaughtUp.Median, f.CaughtUp.Max),
		})
	}
	for _, rule := range slices.Sorted(maps.Keys(r.Violated)) {
		d.Rules = append(d.Rules, fmt.Sprintf("%s: %d", rule, r.Violated[rule]))
	}
	return d
}

// Add is for the template.
func (d drawing) Add(a, b float64) float64 { return a + b }

// RowsHeight is that of a plot with a row for each kind.
func (d drawing) RowsHeight() int { return 16 * len(d.Rows) }

// Row is where a row's text stands.
func (d drawing) Row(i int) int { return 16*i + 12 }
