package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"time"
	"unicode"

	"github.com/rivo/uniseg"
	"github.com/spf13/cobra"

	"github.com/weirhq/weir"
)

const (
	bold    = "1"
	dim     = "2"
	red     = "31"
	reverse = "7"
)

// paint colours text for a terminal.
func paint(on bool, code, text string) string {
	if !on {
		return text
	}
	return "\x1b[" + code + "m" + text + "\x1b[0m"
}

// json reports whether results are to be JSON.
func (g *global) json() bool { return g.output == "json" }

// print writes a result as JSON, or has text write it for people.
func (g *global) print(v any, text func() error) error {
	if !g.json() {
		return text()
	}
	e := json.NewEncoder(g.out)
	e.SetEscapeHTML(false)
	return e.Encode(v)
}

// printAll is print for a list: a document a line, or a table.
func printAll[T any](g *global, list []T, header string, row func(T) []any) error {
	if g.json() {
		for _, v := range list {
			if err := g.print(v, nil); err != nil {
				return err
			}
		}
		return nil
	}
	rows := make([][]any, len(list))
	for i, v := range list {
		rows[i] = row(v)
	}
	return g.table(strings.Fields(header), rows)
}

// done says what was done: in JSON always, to people unless they want it quiet.
func (g *global) done(v any, format string, args ...any) error {
	return g.print(v, func() error {
		if g.quiet {
			return nil
		}
		_, err := fmt.Fprintf(g.out, format+"\n", args...)
		return err
	})
}

// note tells people something on the side.
func (g *global) note(format string, args ...any) {
	if !g.quiet {
		fmt.Fprintf(g.err, "weir: "+format+"\n", args...)
	}
}

// number is a number as text.
type number string

// columns aligns a table, whose first line is the header; numbers to the right.
func columns(header []string, rows [][]any) []string {
	widths := make([]int, len(header))
	for i, h := range header {
		widths[i] = uniseg.StringWidth(h)
	}
	cells := make([][]string, len(rows))
	right := make([]bool, len(header))
	for r, row := range rows {
		cells[r] = make([]string, len(row))
		for i, v := range row {
			switch v := v.(type) {
			case int, int64, number:
				right[i] = true
				cells[r][i] = fmt.Sprint(v)
			default:
				cells[r][i] = visible(fmt.Sprint(v))
			}
			widths[i] = max(widths[i], uniseg.StringWidth(cells[r][i]))
		}
	}
	lines := make([]string, 0, len(rows)+1)
	for _, row := range append([][]string{header}, cells...) {
		var s strings.Builder
		for i, cell := range row {
			if i > 0 {
				s.WriteString("  ")
			}
			pad := strings.Repeat(" ", widths[i]-uniseg.StringWidth(cell))
			if right[i] {
				s.WriteString(pad + cell)
			} else {
				s.WriteString(cell + pad)
			}
		}
		lines = append(lines, strings.TrimRight(s.String(), " "))
	}
	return lines
}

// table writes aligned columns.
func (g *global) table(header []string, rows [][]any) error {
	for i, line := range columns(header, rows) {
		if _, err := fmt.Fprintln(g.out, paint(g.colorOut && i == 0, bold, line)); err != nil {
			return err
		}
	}
	return nil
}

// describe writes names and values, one pair a line.
func (g *global) describe(pairs ...any) error {
	width := 0
	for i := 0; i < len(pairs); i += 2 {
		width = max(width, len(pairs[i].(string)))
	}
	for i := 0; i < len(pairs); i += 2 {
		name := pairs[i].(string)
		pad := strings.Repeat(" ", width-len(name))
		if _, err := fmt.Fprintf(g.out, "%s%s  %s\n", paint(g.colorOut, dim, name+":"), pad, visible(fmt.Sprint(pairs[i+1]))); err != nil {
			return err
		}
	}
	return nil
}

// visible shows control characters as escapes: what comes out of a log must not steer the terminal.
func visible(s string) string {
	var out strings.Builder
	for _, r := range s {
		if unicode.IsControl(r) {
			out.WriteString(strings.Trim(strconv.QuoteRune(r), "'"))
		} else {
			out.WriteRune(r)
		}
	}
	return out.String()
}

func timeText(t time.Time) string { return t.UTC().Format(time.RFC3339) }

// count is a number with its noun.
func count[N int | int64](n N, noun string) string {
	if n != 1 {
		noun += "s"
	}
	return fmt.Sprintf("%d %s", n, noun)
}

// messageJSON is a message as JSON, without its payload, which withPayload adds.
type messageJSON struct {
	ID         int64             `json:"id"`
	Topic      string            `json:"topic,omitempty"`
	Group      string            `json:"group,omitempty"`
	Attempt    int               `json:"attempt,omitempty"`
	Key        *string           `json:"key"`
	Headers    map[string]string `json:"headers"`
	ProducedAt time.Time         `json:"produced_at"`
}

func asJSON(m *weir.Received[[]byte]) messageJSON {
	j := messageJSON{ID: m.ID, Headers: m.Headers, ProducedAt: m.ProducedAt.UTC()}
	if m.Key != "" {
		j.Key = &m.Key
	}
	return j
}

// payloadHelp says how a payload stands in a JSON document.
const payloadHelp = `In a JSON document "payload" is the payload as it was stored (line breaks between its tokens become spaces); on a topic of
format bytes it is a string of base64. "key" and "headers" are null where there are none.`

// withPayload is v as one line of JSON, with the payload at its end. The payload is not decoded and encoded again, which
// would change numbers, escapes and duplicate keys. A line break in JSON can only stand between tokens.
func withPayload(v any, format weir.Format, payload []byte) ([]byte, error) {
	var line bytes.Buffer
	e := json.NewEncoder(&line)
	e.SetEscapeHTML(false)
	if err := e.Encode(v); err != nil {
		return nil, err
	}
	line.Truncate(line.Len() - len("}\n"))
	line.WriteString(`,"payload":`)
	if format == weir.Bytes {
		text, err := json.Marshal(payload)
		if err != nil {
			return nil, err
		}
		line.Write(text)
	} else {
		from := line.Len()
		line.Write(payload)
		for i, b := range line.Bytes()[from:] {
			if b == '\n' || b == '\r' {
				line.Bytes()[from+i] = ' '
			}
		}
	}
	line.WriteString("}\n")
	return line.Bytes(), nil
}

// confirm asks before something is destroyed. Where nobody can be asked, --yes must have been given.
func (g *global) confirm(cmd *cobra.Command, yes bool, format string, args ...any) error {
	if yes {
		return nil
	}
	if !isTerminal(g.in) || !isTerminal(g.err) {
		return usageOf(cmd, "this cannot be undone, and there is no terminal to ask on: give --yes")
	}
	fmt.Fprintf(g.err, format+" This cannot be undone. Go on? [y/N] ", args...)
	answer, _ := bufio.NewReader(g.in).ReadString('\n') // an end of input is a no
	switch strings.ToLower(strings.TrimSpace(answer)) {
	case "y", "yes":
		return nil
	}
	return fmt.Errorf("not confirmed, nothing was changed")
}
