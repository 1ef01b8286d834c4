package demo

import (
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"time"

	"charm.land/lipgloss/v2"
	"github.com/charmbracelet/colorprofile"
	"github.com/charmbracelet/x/ansi"
	"golang.org/x/term"
)

// The colours are the terminal's own sixteen: they fit whatever background it has.
var (
	bold   = lipgloss.NewStyle().Bold(true)
	dim    = lipgloss.NewStyle().Faint(true)
	good   = lipgloss.NewStyle().Foreground(lipgloss.Green)
	bad    = lipgloss.NewStyle().Foreground(lipgloss.Red)
	fenced = lipgloss.NewStyle().Foreground(lipgloss.Yellow)
	cyan   = lipgloss.NewStyle().Foreground(lipgloss.Cyan)
)

const (
	minWidth, minHeight = 60, 18
	maxWidth            = 120
	alternate           = "\x1b[?1049h\x1b[?25l" // the other screen, without a cursor
	original            = "\x1b[?25h\x1b[?1049l"
	begin, end          = "\x1b[?2026h\x1b[H", "\x1b[J\x1b[?2026l" // at once, from the top; and nothing below
)

// colored makes a writer that leaves out the colours that the terminal has not, or that NO_COLOR refuses.
func colored(w, terminal io.Writer) *colorprofile.Writer {
	profile := colorprofile.Detect(terminal, os.Environ())
	if os.Getenv("NO_COLOR") != "" {
		profile = min(profile, colorprofile.ASCII)
	}
	return &colorprofile.Writer{Forward: w, Profile: profile}
}

// show is where a run is shown: a picture that is drawn anew in a terminal, lines elsewhere.
type show struct {
	out    *colorprofile.Writer
	screen *os.File // nil: lines
	once   sync.Once

	final   frame
	printed int // events
	next    time.Duration
}

func (s *state) show(out io.Writer, plain bool) *show {
	v := &show{out: colored(out, out)}
	f, isFile := out.(*os.File)
	if plain || !isFile || !term.IsTerminal(int(f.Fd())) || v.out.Profile <= colorprofile.NoTTY {
		s.mu.Lock()
		defer s.mu.Unlock()
		d := s.d
		fmt.Fprintf(v.out, "weir demo: %s, %s, %s messages/s, seed %d, topic %s\n", d.server,
			plural(d.o.Producers, "producer", "producers"), number(d.o.Rate), d.o.Seed, d.topic)
		return v
	}
	if w, h, err := term.GetSize(int(f.Fd())); err != nil || w < minWidth || h < minHeight {
		return v
	}
	v.screen = f
	_, _ = io.WriteString(f, alternate)
	return v
}

// close gives the terminal back.
func (v *show) close() {
	v.once.Do(func() {
		if v.screen != nil {
			_, _ = io.WriteString(v.screen, original)
		}
	})
}

// last leaves the last picture in the terminal's own screen.
func (v *show) last() {
	v.close()
	if v.screen == nil {
		v.newEvents(v.final.events)
		fmt.Fprintln(v.out)
		return
	}
	w, _, err := term.GetSize(int(v.screen.Fd()))
	if err != nil {
		w = minWidth
	}
	for _, line := range picture(&v.final, w, 1000) {
		fmt.Fprintln(v.out, line)
	}
	fmt.Fprintln(v.out)
}

func (v *show) frame(f *frame) {
	v.final = *f
	if v.screen == nil {
		v.newEvents(f.events)
		if f.at >= v.next {
			v.next = f.at.Truncate(time.Second) + time.Second
			fmt.Fprintln(v.out, line(f))
		}
		return
	}
	w, h, err := term.GetSize(int(v.screen.Fd()))
	if err != nil {
		w, h = minWidth, minHeight
	}
	var b strings.Builder
	b.WriteString(begin)
	for i, line := range picture(f, w, h) {
		if i >= h {
			break
		}
		if i > 0 {
			b.WriteString("\r\n")
		}
		b.WriteString(ansi.Truncate(line, w-1, "…"))
		b.WriteString("\x1b[K")
	}
	b.WriteString(end)
	_, _ = v.out.WriteString(b.String())
}

func (v *show) newEvents(events []event) {
	for ; v.printed < len(events); v.printed++ {
		e := events[v.printed]
		fmt.Fprintf(v.out, "%6.1f s  * %s\n", e.at.Seconds(), e.text)
	}
}

// line is a frame on one line.
func line(f *frame) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%6.1f s  head %s, settled %s, lag:", f.at.Seconds(), number(f.head), number(f.settled))
	for i, g := range f.groups {
		if i > 0 {
			b.WriteByte(',')
		}
		fmt.Fprintf(&b, " %s %s", g.name, number(g.lag))
	}
	fmt.Fprintf(&b, "; naive reader skipped %s", number(f.naive.skipped))
	return b.String()
}

// picture draws a frame for a terminal of that size.
func picture(f *frame, width, height int) []string {
	width = min(width-1, maxWidth)
	const name, count = 13, 10
	note := 36 // columns for what stands behind a bar
	if width < 90 {
		note = 31
	}
	bar := max(width-name-count-note-6, 5)

	var out []string
	add := func(format string, args ...any) { out = append(out, fmt.Sprintf(format, args...)) }
	row := func(label string, style lipgloss.Style, position int64, bar, text string) {
		add(" %s %s  %s  %s", style.Render(pad(label, name)), style.Render(fmt.Sprintf("%*s", count, number(position))), bar, text)
	}

	add("")
	add(" %s  %s", bold.Render("weir demo"), dim.Render(f.title))
	elapsed := int(float64(bar) * (1 - f.left))
	stage := f.stage
	if f.stage == "producing" {
		stage = "producing (Ctrl-C ends it)"
	}
	add(" %s %*s  %s%s  %s", pad("time", name), count, fmt.Sprintf("%.1f s", f.at.Seconds()),
		strings.Repeat("━", elapsed), dim.Render(strings.Repeat("─", bar-elapsed)), dim.Render(stage))
	add("")

	// All bars are on one scale: the ids from head - window to head.
	at := func(id int64) int {
		return min(max(int(float64(bar)*float64(id-f.head+f.window)/float64(f.window)+0.5), 0), bar)
	}
	fence := at(f.settled)
	draw := func(style lipgloss.Style, position int64) string {
		p := at(position)
		if p >= fence {
			return style.Render(strings.Repeat("█", p)) + dim.Render(strings.Repeat("·", bar-p))
		}
		return style.Render(strings.Repeat("█", p)) + style.Render(strings.Repeat("░", fence-p)) + dim.Render(strings.Repeat("·", bar-fence))
	}
	row("head", bold, f.head, strings.Repeat("█", bar), fmt.Sprintf("%s messages/s", number(int(f.rate+0.5))))
	text := good.Render("level with the head")
	if behind := f.head - f.settled; behind > 0 {
		text = fmt.Sprintf("%s behind", number(behind))
		if f.hold != "" {
			text += " " + f.hold
		}
		text = fenced.Render(text)
	}
	row("settled head", fenced, f.settled, fenced.Render(strings.Repeat("█", fence))+dim.Render(strings.Repeat("·", bar-fence)), text)
	add("")
	for _, g := range f.groups {
		text := dim.Render("lag 0")
		if g.lag > 0 {
			text = "lag " + number(g.lag)
		}
		row("group "+g.name, cyan, g.position, draw(cyan, g.position), text)
	}
	add("")
	row("naive reader", bad, f.naive.position, draw(bad, f.naive.position), bad.Render("skipped "+number(f.naive.skipped)))
	add("")
	add(" %s", dim.Render("the last "+number(f.window)+" ids: █ handled  ░ to be handled  · behind the fence"))
	if len(f.workers) > 0 {
		add(" %s", dim.Render(groups[0].name+" is read by processes ")+processList(f.workers))
	}
	add("")

	events := f.events
	if room := height - len(out) - 1; len(events) > room {
		events = events[len(events)-max(room, 0):]
	}
	for _, e := range events {
		style := lipgloss.NewStyle()
		switch {
		case strings.Contains(e.text, "SIGKILL"), strings.Contains(e.text, "by itself"):
			style = bad
		case strings.Contains(e.text, "taken over"):
			style = good
		}
		add(" %s  %s", dim.Render(fmt.Sprintf("%5.1f s", e.at.Seconds())), style.Render(e.text))
	}
	return out
}

func processList(workers []worker) string {
	parts := make([]string, len(workers))
	for i, w := range workers {
		parts[i] = dim.Render(fmt.Sprint(w.pid))
		if !w.alive {
			parts[i] = bad.Strikethrough(true).Render(fmt.Sprint(w.pid))
		}
	}
	return strings.Join(parts, " ")
}

func pad(s string, width int) string {
	return s + strings.Repeat(" ", max(0, width-ansi.StringWidth(s)))
}
