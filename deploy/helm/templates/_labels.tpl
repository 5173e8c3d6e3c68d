{{- define "labels" -}}
{app.kubernetes.io/name: {{ .Chart.Name }}, app.kubernetes.io/instance: {{ .Release.Name | quote }}}
{{- end }}
