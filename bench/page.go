package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"image/color"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/font"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
)

// The page and its plots are made from committed results alone, so that each of their figures can be traced to its run. The plots are
// gonum's: it writes SVG without a browser or a C library, is kept up, and comes as a Go module like everything else here.

// Plot is a chart of a result: a row for each case, and in it a bar for each of Figures, from the series "figure, case".
type Plot struct {
	Title   string
	Figures []string
	// Log has a logarithmic scale, for figures that are worlds apart, and points instead of bars.
	Log bool
}

// pageOrder is the order of the page's sections. What is not in it comes after, by name.
var pageOrder = []string{
	"throughput", "single", "latency", "fanout", "topics", "cursorbench", "claim", "idle", "wal", "memory", "stall", "overlap", "ordered", "retry", "drain",
}

// writePage writes benchmarks.md and its plots to a folder.
func writePage(results, docs string) error {
	files, err := page(results)
	if err != nil {
		return err
	}
	old, err := filepath.Glob(filepath.Join(docs, "benchmarks", "*.svg"))
	if err != nil {
		return err
	}
	for _, file := range old {
		os.Remove(file)
	}
	for name, text := range files {
		name = filepath.Join(docs, name)
		if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(name, text, 0o644); err != nil {
			return err
		}
	}
	return nil
}

// page makes benchmarks.md and its plots from a folder of results.
func page(folder string) (files map[string][]byte, err error) {
	files = map[string][]byte{}
	order := slices.Clone(pageOrder)
	for _, w := range workloads {
		if !slices.Contains(order, w.Name) {
			order = append(order, w.Name)
		}
	}
	var b strings.Builder
	b.WriteString(pageHead)
	for _, p := range peers {
		fmt.Fprintf(&b, "| `%s` | %s |\n", p.Name, p.Short)
	}
	b.WriteString(pageAbout)
	for _, name := range order {
		i := slices.IndexFunc(workloads, func(w Workload) bool { return w.Name == name })
		if i < 0 {
			continue
		}
		r, err := readResult(filepath.Join(folder, name+".json"))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		text, err := section(workloads[i], r, files)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		b.WriteString(text)
	}
	files["benchmarks.md"] = []byte(b.String())
	return files, nil
}

const pageHead = `# Benchmarks

<!-- Written by "go run . page" in bench, from bench/results. -->

What is measured, on what, and how to do it again: [bench](../bench/README.md). A figure is the median of its runs, with half of the
distance between the lowest and the highest. Where systems are compared, they ran in turn, in one run of the program, and the targets
are about the relation of Weir's figure to the other's in the same round. What a run never delivered is counted: figures of Weir
are given only where that is none.

| system | what it is here |
|---|---|
`

const pageAbout = `
Client and server share the machine's processors, so whatever the client saves is the server's to use. All systems have as many
connections, and JSON is encoded and decoded for each message. ` + "`floor`" + ` is no queue: its reader loses messages, and what it shows is
what moving them costs at the least.
`

func readResult(file string) (*Result, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	r := &Result{}
	if err := json.Unmarshal(text, r); err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	if r.Quick {
		return nil, fmt.Errorf("%s is of a smoke run, whose figures mean little", file)
	}
	return r, nil
}

// section is what the page says of a workload. Its plots are added to files.
func section(w Workload, r *Result, files map[string][]byte) (string, error) {
	var b strings.Builder
	fmt.Fprintf(&b, "\n## %s\n\n%s.\n", w.Name, strings.ToUpper(w.Short[:1])+w.Short[1:])
	if r.Error != "" {
		fmt.Fprintf(&b, "\nIt could not be measured to its end: %s.\n", r.Error)
	}
	for i, p := range w.Plots {
		name := fmt.Sprintf("benchmarks/%s.svg", w.Name)
		if i > 0 {
			name = fmt.Sprintf("benchmarks/%s-%d.svg", w.Name, i+1)
		}
		svg, err := r.draw(p)
		if err != nil {
			return "", err
		}
		if svg != nil {
			files[name] = svg
			fmt.Fprintf(&b, "\n![%s](%s)\n", p.Title, name)
		}
	}
	for _, t := range r.tables() {
		b.WriteString("\n")
		for i, row := range t {
			fmt.Fprintf(&b, "| %s |\n", strings.Join(row, " | "))
			if i == 0 {
				b.WriteString(strings.Repeat("|---", len(row)) + "|\n")
			}
		}
	}
	if len(r.Targets) > 0 {
		b.WriteString("\n| target | wanted | measured | |\n|---|---|---|---|\n")
		for _, t := range r.Targets {
			verdict := "reached"
			if !t.Passed {
				verdict = "**missed**"
			}
			fmt.Fprintf(&b, "| %s | %s | %v | %s |\n", t.Name, t.Want, t.Got, verdict)
		}
	}
	commit := r.Commit
	if r.Modified {
		commit += " with changes"
	}
	fmt.Fprintf(&b, "\n[Result](../bench/results/%s.json) of %s: commit %s, PostgreSQL %s, %s, %d CPUs (%s)",
		w.Name, r.Started.Format("2006-01-02"), commit, r.PostgreSQL, r.Go, r.Machine.CPUs, r.Machine.CPU)
	var versions []string
	for _, p := range peers {
		if v := r.Peers[p.Name]; v != "" && !slices.Contains(versions, v) && p.Name != "weir" {
			versions = append(versions, p.Name+" "+v)
		}
	}
	if len(versions) > 0 {
		fmt.Fprintf(&b, "; %s", strings.Join(versions, "; "))
	}
	b.WriteString(".\n")
	return b.String(), nil
}

var barColors = []color.Color{
	color.RGBA{R: 0x2b, G: 0x6c, B: 0xb0, A: 0xff}, color.RGBA{R: 0xdd, G: 0x8a, B: 0x32, A: 0xff}, color.RGBA{R: 0x6b, G: 0x8e, B: 0x5a, A: 0xff},
}

// spans are the medians of a figure's cases, with how far the runs lie apart.
type spans struct {
	plotter.XYs
	plotter.XErrors
}

// draw makes a plot; nil where the result has none of its figures.
func (r *Result) draw(p Plot) ([]byte, error) {
	var (
		cases []string
		unit  string
		of    = map[[2]string]*Series{}
	)
	for _, s := range r.Series {
		figure, name, _ := strings.Cut(s.Name, ", ")
		if !slices.Contains(p.Figures, figure) || p.Log && s.Median <= 0 {
			continue
		}
		if !slices.Contains(cases, name) {
			cases = append(cases, name)
		}
		of[[2]string{figure, name}], unit = s, s.Unit
	}
	if len(cases) == 0 {
		return nil, nil
	}
	slices.Reverse(cases) // the first on top
	chart := plot.New()
	for _, f := range []*font.Font{
		&chart.Title.TextStyle.Font, &chart.X.Label.TextStyle.Font, &chart.X.Tick.Label.Font,
		&chart.Y.Tick.Label.Font, &chart.Legend.TextStyle.Font,
	} {
		f.Variant = "Sans"
	}
	chart.Title.Text = p.Title
	chart.Title.Padding = vg.Points(6)
	chart.X.Label.Text = unit
	chart.Y.Padding = vg.Points(8)
	chart.Legend.Top = true
	chart.Legend.XOffs, chart.Legend.Padding, chart.Legend.ThumbnailWidth = vg.Points(-6), vg.Points(3), vg.Points(12)
	chart.NominalY(cases...)
	grid := plotter.NewGrid()
	grid.Horizontal.Color = nil
	chart.Add(grid)
	if p.Log {
		chart.X.Scale, chart.X.Tick.Marker = plot.LogScale{}, plainTicks{plot.LogTicks{}}
		chart.X.Label.Text += ", logarithmic"
	} else {
		chart.X.Min = 0
		chart.X.Tick.Marker = plainTicks{plot.DefaultTicks{}}
	}
	const row = 34.0 // points
	width := vg.Points(row * 0.8 / float64(len(p.Figures)))
	for i, figure := range p.Figures {
		values, at := make(plotter.Values, len(cases)), spans{}
		// The place of this figure's bar within a row, in rows.
		offset := (float64(len(p.Figures)-1)/2 - float64(i)) * 0.8 / float64(len(p.Figures))
		for k, name := range cases {
			s := of[[2]string{figure, name}]
			if s == nil {
				continue
			}
			values[k] = s.Median
			at.XYs = append(at.XYs, plotter.XY{X: s.Median, Y: float64(k) + offset})
			at.XErrors = append(at.XErrors, struct{ Low, High float64 }{s.Median - s.Min, s.Max - s.Median})
		}
		if p.Log {
			points, err := plotter.NewScatter(at.XYs)
			if err != nil {
				return nil, err
			}
			points.GlyphStyle = draw.GlyphStyle{Color: barColors[i], Radius: vg.Points(4), Shape: draw.CircleGlyph{}}
			chart.Add(points)
			chart.Legend.Add(figure, points)
		} else {
			bars, err := plotter.NewBarChart(values, width)
			if err != nil {
				return nil, err
			}
			bars.Horizontal, bars.Color, bars.LineStyle.Width = true, barColors[i], 0
			bars.Offset = vg.Points(row * offset)
			chart.Add(bars)
			chart.Legend.Add(figure, bars)
		}
		whiskers, err := plotter.NewXErrorBars(at)
		if err != nil {
			return nil, err
		}
		chart.Add(whiskers)
	}
	chart.Y.Min, chart.Y.Max = -0.5, float64(len(cases))-0.5
	if p.Log { // whole decades, so that there are at least two numbers on the scale
		chart.X.Min = math.Pow(10, math.Floor(math.Log10(chart.X.Min)))
		chart.X.Max = math.Pow(10, math.Ceil(math.Log10(chart.X.Max)))
	} else {
		chart.X.Max *= 1.12
	}
	if len(p.Figures) == 1 {
		chart.Legend = plot.NewLegend()
	}
	canvas, err := chart.WriterTo(vg.Points(560), vg.Points(70+row*float64(len(cases))), "svg")
	if err != nil {
		return nil, err
	}
	var b bytes.Buffer
	_, err = canvas.WriteTo(&b)
	return b.Bytes(), err
}

// plainTicks are another's ticks, their numbers without an exponent.
type plainTicks struct{ plot.Ticker }

// Ticks implements plot.Ticker.
func (t plainTicks) Ticks(low, high float64) []plot.Tick {
	ticks := t.Ticker.Ticks(low, high)
	for i := range ticks {
		if ticks[i].Label != "" {
			ticks[i].Label = short(ticks[i].Value)
		}
	}
	return ticks
}
