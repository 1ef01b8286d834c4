// Package testdata holds the catalogue of seeded bugs, for the tests of the SQL and for "weir torture --break".
package testdata

import (
	_ "embed"
	"fmt"
	"strings"

	"github.com/weirhq/weir/sql"
)

//go:embed bugs.txt
var catalogue string

// Bug is a breakage of the SQL.
type Bug struct {
	Name, Why string
	// FoundBy are the scenarios of fence_test.go that must find it.
	FoundBy []string
	Edits   []Edit
}

// Edit replaces a text that stands in a file of the folder sql once.
type Edit struct{ File, Old, New string }

// Bugs reads bugs.txt, whose form stands at its head.
func Bugs() (bugs []Bug, err error) {
	var e *Edit
	var into *string
	flush := func() {
		if e != nil {
			e.Old, e.New = strings.Trim(e.Old, "\n"), strings.Trim(e.New, "\n")
			b := &bugs[len(bugs)-1]
			b.Edits = append(b.Edits, *e)
			e, into = nil, nil
		}
	}
	for i, line := range strings.Split(catalogue, "\n") {
		word, rest, _ := strings.Cut(line, " ")
		switch {
		case strings.HasPrefix(line, "#"):
		case word == "==":
			flush()
			bugs = append(bugs, Bug{Name: rest})
		case word == "why:":
			bugs[len(bugs)-1].Why = rest
		case word == "found-by:":
			bugs[len(bugs)-1].FoundBy = strings.Fields(rest)
		case word == "file:":
			flush()
			e = &Edit{File: rest}
			into = &e.Old
		case line == "->" && e != nil:
			into = &e.New
		case into != nil:
			*into += line + "\n"
		case strings.TrimSpace(line) != "":
			return nil, fmt.Errorf("bugs.txt:%d: cannot read %q", i+1, line)
		}
	}
	flush()
	return bugs, nil
}

// Texts are the files that the bug changes, broken, for the default schema.
func (b Bug) Texts() (texts map[string]string, err error) {
	texts = map[string]string{}
	for _, e := range b.Edits {
		text, ok := texts[e.File]
		if !ok {
			text = sql.Text(sql.DefaultSchema, e.File)
		}
		if n := strings.Count(text, e.Old); n != 1 {
			return nil, fmt.Errorf("bug %q: %s has this text %d times, it must have it once:\n%s", b.Name, e.File, n, e.Old)
		}
		texts[e.File] = strings.Replace(text, e.Old, e.New, 1)
	}
	return texts, nil
}
