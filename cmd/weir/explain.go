package main

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/charmbracelet/x/ansi"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/weirhq/weir/docs"
)

// explanation is a section of docs/errors.md.
type explanation struct {
	Codes   []string `json:"codes"` // SQLSTATEs, none for an error of the Go library alone
	Go      string   `json:"go,omitempty"`
	Means   string   `json:"means"`
	Cause   string   `json:"cause"`
	Changed string   `json:"changed"`
	Remedy  string   `json:"remedy"`
	Example string   `json:"example"`         // statements or code, "" where there is only what is printed
	Prints  string   `json:"error,omitempty"` // what is printed then
}

// explanations reads docs/errors.md. A section has a heading with its codes and its name in Go, paragraphs of which some begin with a
// label, and one or two blocks.
var explanations = sync.OnceValue(func() (list []explanation) {
	for _, section := range strings.Split(docs.Errors, "\n## ")[1:] {
		heading, body, _ := strings.Cut(section, "\n")
		e := explanation{Codes: []string{}}
		for _, name := range strings.Split(heading, ", ") {
			if strings.HasPrefix(name, "Err") {
				e.Go = name
			} else {
				e.Codes = append(e.Codes, name)
			}
		}
		parts := strings.Split(body, "```")
		for i := 1; i < len(parts); i += 2 {
			language, text, _ := strings.Cut(parts[i], "\n")
			if text = strings.TrimSpace(text); language == "text" {
				e.Prints = text
			} else {
				e.Example = text
			}
		}
		for _, paragraph := range strings.Split(strings.TrimSpace(parts[0]), "\n\n") {
			text := strings.ReplaceAll(strings.ReplaceAll(paragraph, "`", ""), "\n", " ")
			label, rest, _ := strings.Cut(text, ": ")
			switch label {
			case "Cause":
				e.Cause = rest
			case "Changed":
				e.Changed = rest
			case "Remedy":
				e.Remedy = rest
			default:
				e.Means = text
			}
		}
		list = append(list, e)
	}
	return list
})

func (e explanation) names() []string {
	if e.Go == "" {
		return e.Codes
	}
	return append(slices.Clone(e.Codes), e.Go)
}

// explain finds what people call an error: a code, its number, or a name in Go, which several can have.
func explain(name string) (found []explanation) {
	name = strings.TrimPrefix(name, "weir.")
	for _, e := range explanations() {
		if slices.ContainsFunc(e.names(), func(n string) bool { return strings.EqualFold(n, name) }) {
			found = append(found, e)
		}
	}
	if n, err := strconv.ParseUint(name, 10, 16); err == nil && len(found) == 0 && n < 1000 {
		return explain(fmt.Sprintf("WE%03d", n))
	}
	return found
}

// explained is the code of an error of the server that "weir explain" knows, else "".
func explained(err error) string {
	var pg *pgconn.PgError
	if errors.As(err, &pg) && len(explain(pg.Code)) > 0 {
		return pg.Code
	}
	return ""
}

func explainCommand(g *global) *cobra.Command {
	return &cobra.Command{
		Use:   "explain [CODE]",
		Short: "Explain an error code",
		Long: `Explains an error: what it means, what usually causes it, what was changed before it, what to do, and an example. CODE is
a SQLSTATE as it stands in brackets at the end of an error (WE010, we010 or 10), or the error's name in the Go library
(ErrLeaseLost), which several codes can have. Without CODE all of them are listed. No database is needed.`,
		Example: "  weir explain WE010\n  weir explain ErrLeaseLost --output json | jq -r .remedy\n  weir explain",
		Args:    arguments,
		ValidArgsFunction: func(_ *cobra.Command, args []string, _ string) (names []cobra.Completion, _ cobra.ShellCompDirective) {
			if len(args) == 0 {
				for _, e := range explanations() {
					for _, name := range e.names() {
						names = append(names, cobra.CompletionWithDesc(name, e.Means))
					}
				}
			}
			return names, cobra.ShellCompDirectiveNoFileComp
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return printAll(g, explanations(), "CODE GO MEANS", func(e explanation) []any {
					return []any{cmp.Or(strings.Join(e.Codes, " "), "-"), cmp.Or(e.Go, "-"), e.Means}
				})
			}
			found := explain(args[0])
			if len(found) == 0 {
				var known []string
				for _, e := range explanations() {
					for _, name := range e.names() {
						if !slices.Contains(known, name) {
							known = append(known, name)
						}
					}
				}
				return usageOf(cmd, "%q is no error of Weir; there are %s", args[0], strings.Join(known, ", "))
			}
			for i, e := range found {
				err := g.print(e, func() error {
					if i > 0 {
						fmt.Fprintln(g.out)
					}
					g.printExplanation(e)
					return nil // out keeps its first error
				})
				if err != nil {
					return err
				}
			}
			return nil
		},
	}
}

func (g *global) printExplanation(e explanation) {
	width := 100
	if f, ok := g.stdout.(*os.File); ok {
		if w, _, err := term.GetSize(int(f.Fd())); err == nil {
			width = min(width, w)
		}
	}
	fmt.Fprintf(g.out, "%s\n%s\n", paint(g.colorOut, bold, strings.Join(e.names(), ", ")), ansi.Wordwrap(e.Means, width, ""))
	for _, p := range []struct{ label, text string }{{"Cause", e.Cause}, {"Changed", e.Changed}, {"Remedy", e.Remedy}} {
		text := strings.TrimPrefix(ansi.Wordwrap(p.label+": "+p.text, width, ""), p.label+":")
		fmt.Fprintf(g.out, "\n%s%s\n", paint(g.colorOut, dim, p.label+":"), text)
	}
	for _, block := range []string{e.Example, e.Prints} {
		if block != "" {
			fmt.Fprintf(g.out, "\n    %s\n", strings.ReplaceAll(block, "\n", "\n    "))
		}
	}
}
